// Torch's own lists of operators, registered for the device's autocast key.
#include "autocast.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace sim {

// Torch's lists and its KERNEL_PRIVATEUSEONE expect a library called `m`.
void register_autocast() {
  constexpr auto key = c10::DispatchKey::AutocastPrivateUse1;
  // Without this, any operator that is in none of the lists fails inside an autocast region.
  static auto* others = new torch::Library(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
  others->fallback(torch::CppFunction::makeFallthrough());

  static auto* listed = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  auto& m = *listed;
#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
#undef LOWER_PRECISION
#define FULL_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(FULL_PRECISION)
#undef FULL_PRECISION
#define OPTIONAL_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(OPTIONAL_DTYPE)
#undef OPTIONAL_DTYPE
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(WIDEST)
#undef WIDEST
}

} // namespace sim
