// How an alias is made: a second storage on the device storage's memory, which it keeps alive.
#include "aliasing.h"

#include "device.h"
#include "device_memory.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/TensorImpl.h>

#include <optional>

namespace sim {
namespace {

c10::Storage alias_storage(const c10::Storage& device) {
  auto* impl = device.unsafeGetStorageImpl();
  auto* owner = new c10::Storage(device);
  c10::DataPtr data(
      to_host_address(impl->data()),
      owner,
      [](void* context) { delete static_cast<c10::Storage*>(context); },
      c10::Device(c10::DeviceType::CPU));
  return c10::Storage(
      c10::Storage::use_byte_size_t(),
      impl->nbytes(),
      std::move(data),
      c10::GetAllocator(c10::DeviceType::CPU),
      /*resizable=*/true);
}

} // namespace

Bytes bytes_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return {0, 0};
  }
  return {
      static_cast<size_t>(tensor.storage_offset() * tensor.itemsize()),
      at::detail::computeStorageNbytes(
          tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset())};
}

namespace {

// The tensor's memory, if it has a block; raises if it has none any more.
std::optional<DeviceRange> checked_range_of(const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      tensor.has_storage(),
      "sim: tensors of layout ",
      tensor.layout(),
      " are not supported, only strided ones");
  const auto* storage = tensor.storage().unsafeGetStorageImpl();
  const auto bytes = bytes_of(tensor);
  TORCH_CHECK(
      storage->nbytes() >= bytes.end,
      "sim: illegal memory access: a tensor of shape ",
      tensor.sizes(),
      " on ",
      tensor.device(),
      " needs ",
      bytes.end,
      " bytes of storage, which has ",
      storage->nbytes(),
      ": it was freed or shrunk");
  auto* block = block_of(storage->data_ptr());
  return block == nullptr ? std::nullopt : std::optional<DeviceRange>({block, bytes});
}

} // namespace

void prepare_for_use(const at::Tensor& tensor) {
  if (const auto range = checked_range_of(tensor)) {
    before_device_use(*range);
  }
}

void prepare_for_copy(const at::Tensor& tensor) {
  if (const auto range = checked_range_of(tensor)) {
    before_device_copy(*range);
  }
}

at::Tensor tensor_like(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  impl->_set_conj(like.is_conj());
  impl->_set_neg(like.is_neg());
  return tensor;
}

at::Tensor Aliases::of(const at::Tensor& tensor) {
  prepare_for_use(tensor);
  const auto& device = tensor.storage();
  auto& cpu = cpu_by_device_[device.unsafeGetStorageImpl()];
  if (!cpu) {
    cpu = alias_storage(device);
    device_by_cpu_.emplace(cpu.unsafeGetStorageImpl(), device);
  }
  return tensor_like(cpu, c10::DispatchKey::CPU, tensor);
}

c10::Storage Aliases::device_storage_of(const c10::StorageImpl* cpu) const {
  const auto found = device_by_cpu_.find(cpu);
  return found == device_by_cpu_.end() ? c10::Storage() : found->second;
}

at::Tensor cpu_alias(const at::Tensor& tensor) {
  return tensor.defined() && is_on_device(tensor) ? Aliases().of(tensor) : tensor;
}

} // namespace sim
