// Device tensors as the CPU kernels see them: CPU tensors on the same memory, without its tag.
//
// An alias keeps the device storage alive, and is refused for a tensor whose storage is too small
// for it, which is a tensor of freed memory (FSDP frees unsharded parameters by resizing their
// storage to zero): a Python error here, where a CPU kernel would run into a segmentation fault.
#pragma once

#include "streams.h"

#include <ATen/core/Tensor.h>

#include <unordered_map>

namespace sim {

inline bool is_on_device(const at::Tensor& tensor) {
  return tensor.device().type() == c10::DeviceType::PrivateUse1;
}

// The bytes of its storage that the tensor uses.
Bytes bytes_of(const at::Tensor& tensor);

// What has to be done before an operation of the current stream uses a device tensor: check that
// its memory is there (raises if not), and order the use after the copies in flight.
void prepare_for_use(const at::Tensor& tensor);

// The same before a copy on the link uses it.
void prepare_for_copy(const at::Tensor& tensor);

// A tensor of the geometry (and conj and neg bits) of `like`, on another storage and device.
at::Tensor tensor_like(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like);

// The aliases of one operation. Tensors that share a storage on the device share it as aliases, so
// that a kernel's overlap checks work, and so that a result which is a view of an argument can be
// recognised as one.
class Aliases {
 public:
  // The alias of a device tensor.
  at::Tensor of(const at::Tensor& tensor);

  // The device storage that `cpu` is an alias of; undefined if it is none.
  c10::Storage device_storage_of(const c10::StorageImpl* cpu) const;

 private:
  std::unordered_map<const c10::StorageImpl*, c10::Storage> cpu_by_device_;
  std::unordered_map<const c10::StorageImpl*, c10::Storage> device_by_cpu_;
};

// The alias of a single device tensor; any other tensor is returned as it is.
at::Tensor cpu_alias(const at::Tensor& tensor);

} // namespace sim
