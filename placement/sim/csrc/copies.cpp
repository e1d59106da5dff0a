// Copies: who waits for whom, what runs beside the host or is late, and the copy itself, between
// aliases on the CPU.
#include "copies.h"

#include "aliasing.h"
#include "counters.h"
#include "device.h"
#include "device_memory.h"
#include "failure_plan.h"
#include "link.h"
#include "pinned_memory.h"
#include "streams.h"

#include <ATen/core/Tensor.h>
#include <torch/library.h>


namespace sim {
namespace {

using at::Tensor;

void check_copy_may_run(const Tensor& source, const Tensor& target) {
  TORCH_CHECK(
      !must_fail(PlannedEvent::Copy),
      "sim: copy failed (planned): ",
      target.nbytes(),
      " bytes from ",
      source.device(),
      " to ",
      target.device());
}

bool have_the_same_bytes_in_order(const Tensor& source, const Tensor& target) {
  return source.dtype() == target.dtype() && source.sizes() == target.sizes() &&
      source.strides() == target.strides() && source.is_non_overlapping_and_dense() &&
      source.is_conj() == target.is_conj() && source.is_neg() == target.is_neg();
}

// Copies that cudaMemcpyAsync makes without the host waiting: from or to pinned memory, and the
// same bytes in the same order on both sides. (Torch makes any other copy through a temporary
// tensor on the host, which isn't pinned, and copies of pageable memory wait for the stream.)
bool can_run_beside(const Tensor& source, const Tensor& target, const Tensor& host) {
  return have_the_same_bytes_in_order(source, target) &&
      is_pinned_address(host.storage().data());
}

HostRange host_range(const Tensor& tensor) {
  return {tensor.storage(), bytes_of(tensor)};
}

DeviceRange device_range(const Tensor& tensor) {
  return {block_of(tensor.storage().data_ptr()), bytes_of(tensor)};
}

// Whether both are nothing but their bytes, of which there are some.
bool are_their_bytes(const Tensor& source, const Tensor& target) {
  return source.layout() == c10::kStrided && target.layout() == c10::kStrided &&
      !source.is_quantized() && !source._is_zerotensor() && source.numel() != 0;
}

void copy_now(const Tensor& source, const Tensor& target) {
  if (are_their_bytes(source, target) && have_the_same_bytes_in_order(source, target)) {
    // As a copy engine does it; making aliases for a CPU kernel takes longer than a small copy.
    for (const auto* tensor : {&source, &target}) {
      if (is_on_device(*tensor)) {
        prepare_for_use(*tensor);
      }
    }
    copy_bytes(
        to_host_address(target.mutable_data_ptr()),
        to_host_address(source.const_data_ptr()),
        target.nbytes());
    return;
  }
  auto cpu_target = cpu_alias(target);
  cpu_target.copy_(cpu_alias(source));
}

void copy_between_host_and_device(const Tensor& source, const Tensor& target, bool non_blocking) {
  const bool to_device = is_on_device(target);
  const auto& host = to_device ? source : target;
  const auto& on_device = to_device ? target : source;
  const auto device = on_device.device().index();
  before_host_use(host_range(host), device);
  if (non_blocking && target.numel() != 0 && can_run_beside(source, target, host)) {
    if (copies_are_delayed()) {
      prepare_for_use(on_device);
      to_device ? delay_host_to_device(host_range(source), device_range(target))
                : delay_device_to_host(device_range(source), host_range(target));
    } else {
      prepare_for_copy(on_device);
      to_device ? send_host_to_device(source.const_data_ptr(), device_range(target))
                : send_device_to_host(device_range(source), target.mutable_data_ptr());
    }
    return;
  }
  const bool host_waits = !non_blocking || !to_device;
  if (host_waits) {
    synchronize_stream(device, current_stream(device));
  }
  copy_now(source, target);
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  check_copy_may_run(source, target);
  auto& count = counters();
  const auto nbytes = target.nbytes();
  if (is_on_device(source) && is_on_device(target)) {
    ++count.device_to_device_copies;
    count.device_to_device_bytes += nbytes;
    copy_now(source, target);
    return target;
  }
  if (is_on_device(target)) {
    ++count.host_to_device_copies;
    count.host_to_device_bytes += nbytes;
  } else {
    ++count.device_to_host_copies;
    count.device_to_host_bytes += nbytes;
  }
  copy_between_host_and_device(source, target, non_blocking);
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, /*non_blocking=*/false);
}

// tensor.item(): a blocking copy of one element.
at::Scalar local_scalar_dense(const Tensor& tensor) {
  const auto device = tensor.device().index();
  synchronize_stream(device, current_stream(device));
  return cpu_alias(tensor).item();
}

// The reason to name a stream here is the copies in flight on it.
void record_stream(Tensor& tensor, c10::Stream stream) {
  device_allocator()->recordStream(tensor.storage().data_ptr(), stream);
}

// The copy between aliases reads a lazily conjugated or negated tensor right. The fallback of these
// keys would resolve it first, with a copy, which is resolved first, and so on without end.
void leave_lazy_views_to_the_copy(c10::DispatchKey key) {
  auto* library = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  library->impl("_copy_from", torch::CppFunction::makeFallthrough());
  library->impl("_copy_from_and_resize", torch::CppFunction::makeFallthrough());
}

} // namespace

void register_copies() {
  leave_lazy_views_to_the_copy(c10::DispatchKey::Conjugate);
  leave_lazy_views_to_the_copy(c10::DispatchKey::Negative);
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", kDispatchKey, __FILE__, __LINE__);
  library->impl("_copy_from", &copy_from);
  library->impl("_copy_from_and_resize", &copy_from_and_resize);
  library->impl("_local_scalar_dense", &local_scalar_dense);
  library->impl("record_stream", &record_stream);
}

} // namespace sim
