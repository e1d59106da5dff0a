// One function an operator, and at the end their registration.
#include "tensors.h"

#include "aliasing.h"
#include "device.h"
#include "device_memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace sim {
namespace {

using at::Tensor;
using c10::IntArrayRef;

c10::DeviceIndex device_index_for(std::optional<c10::Device> device, std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  const auto index = device && device->has_index() ? device->index() : current_device();
  check_device_index(index);
  return index;
}

Tensor empty(
    IntArrayRef sizes,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool> pinned,
    std::optional<c10::MemoryFormat> memory_format) {
  CurrentDeviceGuard guard(device_index_for(device, pinned));
  return at::detail::empty_generic(
      sizes,
      device_allocator(),
      c10::DispatchKeySet(kDispatchKey),
      c10::dtype_or_default(dtype),
      memory_format);
}

Tensor empty_strided(
    IntArrayRef sizes,
    IntArrayRef strides,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool> pinned) {
  CurrentDeviceGuard guard(device_index_for(device, pinned));
  return at::detail::empty_strided_generic(
      sizes,
      strides,
      device_allocator(),
      c10::DispatchKeySet(kDispatchKey),
      c10::dtype_or_default(dtype));
}

const Tensor& resize(
    const Tensor& self, IntArrayRef sizes, std::optional<c10::MemoryFormat> memory_format) {
  if (self.sizes() == sizes && !memory_format) {
    return self;
  }
  auto* storage = self.storage().unsafeGetStorageImpl();
  const auto needed =
      at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(), self.storage_offset());
  if (storage->nbytes() < needed) {
    TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
    resize_device_storage(storage, needed);
  }
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  if (memory_format && *memory_format != c10::MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*memory_format);
  }
  return self;
}

Tensor as_strided(
    const Tensor& self, IntArrayRef sizes, IntArrayRef strides, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

Tensor view(const Tensor& self, IntArrayRef sizes) {
  return at::native::view(self, sizes);
}

Tensor reshape_alias(const Tensor& self, IntArrayRef sizes, IntArrayRef strides) {
  return at::native::_reshape_alias(self, sizes, strides);
}

std::vector<int64_t> contiguous_strides(IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (auto dim = static_cast<int64_t>(sizes.size()) - 1; dim >= 0; --dim) {
    strides[dim] = stride;
    stride *= sizes[dim];
  }
  return strides;
}

// The check and its words are those of torch's own set_ for every backend (checkSetStorage), which
// it doesn't export: a tensor moved under FSDP's CPU offload policy runs into it.
Tensor& set_storage_with_geometry(
    Tensor& self, c10::Storage source, int64_t offset, IntArrayRef sizes, IntArrayRef strides) {
  TORCH_CHECK(
      self.storage().device() == source.device(),
      "Attempted to set the storage of a tensor on device \"",
      self.storage().device(),
      "\" to a storage on different device \"",
      source.device(),
      "\".  This is no longer allowed; the devices must match.");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  const bool strides_given = strides.data() != nullptr;
  impl->set_sizes_and_strides(
      sizes, strides_given ? strides.vec() : contiguous_strides(sizes), offset);
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source) {
  const auto elements = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage_with_geometry(self, std::move(source), 0, {elements}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  if (self.is_same(source)) {
    return self;
  }
  return set_storage_with_geometry(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_empty(Tensor& self) {
  c10::Storage empty_storage(
      c10::Storage::use_byte_size_t(),
      /*size_bytes=*/0,
      allocate_on_device(0, self.device().index()),
      device_allocator(),
      /*resizable=*/true);
  return set_storage_with_geometry(self, std::move(empty_storage), 0, {0}, {});
}

bool is_set_to(const Tensor& self, const Tensor& other) {
  return self.storage().is_alias_of(other.storage()) &&
      self.storage_offset() == other.storage_offset() && self.sizes() == other.sizes() &&
      self.strides() == other.strides();
}

// Whether `self.data = other` may work, and with it whether Module.to() can keep a Parameter's
// identity. Torch says yes among its dense backends, by a list that this device can't join, so the
// question is answered here by torch's rule for the listed ones: dense or not, and nothing else.
//
// Registered for autograd's key too, since that one is reached first. A kernel for the device alone
// would send DTensors (whose `.data =` asks about the wrapper, as here) on to Python and through
// uncached sharding propagation: 2 ms for each parameter of every Module.to().
bool has_compatible_shallow_copy_type(const Tensor& self, const Tensor& other) {
  const auto is_dense = [](const Tensor& tensor) {
    return tensor.key_set().has_any(c10::DispatchKeySet(c10::DispatchKey::Dense)) &&
        (tensor.is_cpu() || is_on_device(tensor));
  };
  return self.key_set() == other.key_set() || (is_dense(self) && is_dense(other));
}

} // namespace

void register_tensor_operators() {
  static auto* device =
      new torch::Library(torch::Library::IMPL, "aten", kDispatchKey, __FILE__, __LINE__);
  device->impl("empty.memory_format", &empty);
  device->impl("empty_strided", &empty_strided);
  device->impl("resize_", &resize);
  device->impl("as_strided", &as_strided);
  device->impl("view", &view);
  device->impl("_reshape_alias", &reshape_alias);
  device->impl("set_.source_Storage", &set_storage);
  device->impl("set_.source_Storage_storage_offset", &set_storage_with_geometry);
  device->impl("set_.source_Tensor", &set_tensor);
  device->impl("set_", &set_empty);
  device->impl("is_set_to", &is_set_to);
  device->impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);

  static auto* autograd = new torch::Library(
      torch::Library::IMPL, "aten", c10::DispatchKey::AutogradPrivateUse1, __FILE__, __LINE__);
  autograd->impl("_has_compatible_shallow_copy_type", &has_compatible_shallow_copy_type);
}

} // namespace sim
