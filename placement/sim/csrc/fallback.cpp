// The life of one operation, step by step, in the class Operation.
#include "fallback.h"

#include "aliasing.h"
#include "counters.h"
#include "device.h"
#include "device_memory.h"
#include "random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/op_registration/adaption.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace sim {
namespace {

using at::Tensor;
using c10::IValue;

bool holds_tensors(at::ArrayRef<IValue> list) {
  return std::any_of(list.begin(), list.end(), [](const IValue& item) { return item.isTensor(); });
}

// Calls `visit(tensor)` for each defined tensor of an argument.
template <class Visit>
void for_each_tensor(const IValue& value, Visit&& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) {
      visit(value.toTensor());
    }
  } else if (value.isList() && !value.isIntList()) {
    for (const IValue& item : value.toListRef()) {
      if (item.isTensor() && item.toTensor().defined()) {
        visit(item.toTensor());
      }
    }
  }
}

// Replaces each defined tensor of an argument or result (a tensor, a list of tensors, or a list of
// optional tensors) by `map(tensor)`.
template <class Map>
void map_tensors(IValue& value, Map&& map) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    if (tensor.defined()) {
      value = map(tensor);
    }
  } else if (value.isTensorList()) {
    c10::List<Tensor> mapped;
    for (const Tensor& tensor : value.toTensorVector()) {
      mapped.push_back(tensor.defined() ? map(tensor) : tensor);
    }
    value = std::move(mapped);
  } else if (value.isList() && !value.isIntList() && holds_tensors(value.toListRef())) {
    c10::List<std::optional<Tensor>> mapped;
    for (const IValue& item : value.toListRef()) {
      const bool is_defined = item.isTensor() && item.toTensor().defined();
      mapped.push_back(is_defined ? std::optional<Tensor>(map(item.toTensor())) : std::nullopt);
    }
    value = std::move(mapped);
  }
}

// Operators that accept indices on the CPU for a tensor on the device, as CUDA does.
bool accepts_cpu_indices(std::string_view op) {
  return op == "aten::index" || op == "aten::index_put" || op == "aten::index_put_" ||
      op == "aten::_index_put_impl_";
}

// Dropout takes no generator: its CPU kernel draws from the CPU's default one, which the operation
// of another device must leave as it was.
class SeededDefaultCpuGenerator {
 public:
  explicit SeededDefaultCpuGenerator(uint64_t seed)
      : generator_(at::detail::getDefaultCPUGenerator()), state_(generator_.get_state()) {
    generator_.set_current_seed(seed);
  }
  ~SeededDefaultCpuGenerator() {
    generator_.set_state(state_);
  }
  SeededDefaultCpuGenerator(const SeededDefaultCpuGenerator&) = delete;
  SeededDefaultCpuGenerator& operator=(const SeededDefaultCpuGenerator&) = delete;

 private:
  at::Generator generator_;
  Tensor state_;
};

// One operation of the device, from its arguments to its results.
class Operation {
 public:
  Operation(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), schema_(op.schema()), stack_(stack) {}

  void run() {
    find_device();
    check_devices();
    alias_arguments();
    replace_generators();
    run_cpu_kernel();
    take_over_resized_storages();
    map_results();
  }

 private:
  IValue& argument(size_t index) {
    return (*stack_)[stack_->size() - schema_.arguments().size() + index];
  }

  // The device of the first device tensor or, for a factory function, of the device argument.
  void find_device() {
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      for_each_tensor(argument(i), [this](const Tensor& tensor) {
        if (is_on_device(tensor) && !has_device_tensors_) {
          has_device_tensors_ = true;
          device_ = tensor.device();
        }
      });
    }
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      auto& value = argument(i);
      if (value.isDevice() && value.toDevice().type() == kDeviceType) {
        if (!has_device_tensors_) {
          device_ = with_index(value.toDevice());
        }
        value = c10::Device(c10::DeviceType::CPU);
      }
    }
  }

  void check_devices() {
    if (!has_device_tensors_) {
      return;
    }
    const bool cpu_indices = accepts_cpu_indices(schema_.name());
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      const auto& name = schema_.arguments()[i].name();
      for_each_tensor(argument(i), [&](const Tensor& tensor) {
        const bool may_stay_on_cpu = tensor.dim() == 0 || (cpu_indices && name == "indices");
        if (tensor.device() != device_ && !(tensor.is_cpu() && may_stay_on_cpu)) {
          c10::impl::common_device_check_failure(
              device_, tensor, schema_.name().c_str(), name.c_str());
        }
      });
    }
  }

  void alias_arguments() {
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      map_tensors(argument(i), [this](const Tensor& tensor) {
        if (!is_on_device(tensor)) {
          cpu_arguments_.push_back(tensor);
          return tensor;
        }
        auto alias = aliases_.of(tensor);
        device_arguments_.emplace(alias.unsafeGetTensorImpl(), AliasedArgument{tensor, alias});
        elements_ = std::max<uint64_t>(elements_, tensor.numel());
        return alias;
      });
    }
  }

  // Random operators draw from the device's generator where none is given.
  void replace_generators() {
    for (size_t i = 0; i < schema_.arguments().size(); ++i) {
      auto& value = argument(i);
      if (value.isGenerator()) {
        value = cpu_generator_for(value.toGenerator(), elements_);
      } else if (value.isNone() && schema_.arguments()[i].name() == "generator") {
        value = cpu_generator_for(default_generator(device_.index()), elements_);
      }
    }
  }

  void run_cpu_kernel() {
    std::optional<SeededDefaultCpuGenerator> seeded;
    if (schema_.name() == "aten::native_dropout") {
      const auto& generator = default_generator(device_.index());
      seeded.emplace(cpu_generator_for(generator, elements_).current_seed());
    }
    LendToCpuKernels lend(device_.index());
    at::AutoDispatchBelowAutograd below_autograd;
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
  }

  // A kernel that found an out= argument too small gave the alias new memory or a new shape.
  void take_over_resized_storages() {
    for (const auto& [unused, argument] : device_arguments_) {
      auto* device = argument.tensor.storage().unsafeGetStorageImpl();
      auto* cpu = argument.alias.storage().unsafeGetStorageImpl();
      if (to_host_address(device->data()) != cpu->data() || device->nbytes() != cpu->nbytes()) {
        ++counters().out_resizes;
        const auto nbytes = cpu->nbytes();
        device->set_data_ptr_noswap(adopt_cpu_memory(cpu, device_.index()));
        device->set_nbytes(nbytes);
      }
      if (argument.alias.sizes() != argument.tensor.sizes() ||
          argument.alias.strides() != argument.tensor.strides() ||
          argument.alias.storage_offset() != argument.tensor.storage_offset()) {
        argument.tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
            argument.alias.sizes(), argument.alias.strides(), argument.alias.storage_offset());
      }
    }
  }

  void map_results() {
    const auto results = schema_.returns().size();
    for (size_t i = stack_->size() - results; i < stack_->size(); ++i) {
      map_tensors((*stack_)[i], [this](const Tensor& tensor) { return to_device(tensor); });
    }
  }

  // A result is an argument, or a view of an argument, or new.
  Tensor to_device(const Tensor& result) {
    const auto argument = device_arguments_.find(result.unsafeGetTensorImpl());
    if (argument != device_arguments_.end()) {
      return argument->second.tensor;
    }
    const auto is_result = [&result](const Tensor& tensor) { return tensor.is_same(result); };
    if (std::any_of(cpu_arguments_.begin(), cpu_arguments_.end(), is_result)) {
      return result;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        result.layout() == c10::kStrided && result.has_storage(),
        "sim: ",
        schema_.name(),
        " gives a tensor of layout ",
        result.layout(),
        "; only strided tensors are supported");
    auto* cpu = result.storage().unsafeGetStorageImpl();
    auto storage = aliases_.device_storage_of(cpu);
    if (!storage) {
      storage = adopted_storage(cpu);
    }
    return tensor_like(std::move(storage), kDispatchKey, result);
  }

  // New results may share a storage among themselves.
  c10::Storage adopted_storage(c10::StorageImpl* cpu) {
    auto& storage = adopted_[cpu];
    if (!storage) {
      const auto nbytes = cpu->nbytes();
      storage = c10::Storage(
          c10::Storage::use_byte_size_t(),
          nbytes,
          adopt_cpu_memory(cpu, device_.index()),
          device_allocator(),
          /*resizable=*/true);
    }
    return storage;
  }

  struct AliasedArgument {
    Tensor tensor;
    Tensor alias;
  };

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;

  c10::Device device_{kDeviceType, current_device()};
  bool has_device_tensors_ = false;
  uint64_t elements_ = 1; // of the largest argument: how far a generator moves on
  Aliases aliases_;
  std::unordered_map<const c10::TensorImpl*, AliasedArgument> device_arguments_;
  std::vector<Tensor> cpu_arguments_;
  std::unordered_map<const c10::StorageImpl*, c10::Storage> adopted_;
};

} // namespace

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++counters().fallback_operations;
  Operation(op, stack).run();
}

void register_fallback() {
  static auto* all_operators =
      new torch::Library(torch::Library::IMPL, "_", kDispatchKey, __FILE__, __LINE__);
  all_operators->fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  // These have a kernel for every backend, which looks for the backend's own convolution library
  // and ends in operators to be overridden; handed to the CPU whole they need no kernel here.
  static auto* whole =
      new torch::Library(torch::Library::IMPL, "aten", kDispatchKey, __FILE__, __LINE__);
  for (const char* name : {"convolution", "convolution_backward"}) {
    whole->impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
}

} // namespace sim
