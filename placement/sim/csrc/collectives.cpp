// One method a collective: count it, alias the tensors, let gloo do it, wait, and hand out finished
// work. What gloo can't do (averages, scaled sums, device barriers) is added here.
#include "collectives.h"

#include "aliasing.h"
#include "counters.h"
#include "device.h"
#include "failure_plan.h"

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <functional>
#include <thread>

namespace sim {
namespace {

using at::Tensor;
using c10d::OpType;
using c10d::Work;
using Tensors = std::vector<Tensor>;
using TensorLists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<Work>;

// The work of a collective that is over. Gloo's own Work must not be returned once its result was
// used: gloo's reduce-scatter copies its result out again each time it is waited for, so what was
// done to it meanwhile (the division of an average) is lost. At two ranks that doubled the
// gradients, which AdamW hides from the losses.
class CompletedWork final : public Work {
 public:
  CompletedWork(OpType type, Tensors results)
      : Work(/*rank=*/-1, type),
        results_(std::move(results)),
        future_(
            c10::make_intrusive<c10::ivalue::Future>(
                c10::ListType::create(c10::TensorType::get()))) {
    future_->markCompleted(c10::IValue(results_)); // DDP takes its gradients from here
  }

  bool isCompleted() override {
    return true;
  }

  bool isSuccess() const override {
    return true;
  }

  bool wait(std::chrono::milliseconds) override {
    return true;
  }

  void synchronize() override {}

  Tensors result() override {
    return results_;
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  Tensors results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

Tensor alias_of(const Tensor& tensor) {
  TORCH_CHECK(
      is_on_device(tensor), "simccl: collectives take tensors on sim, not on ", tensor.device());
  return cpu_alias(tensor);
}

Tensors aliases_of(const Tensors& tensors) {
  Tensors aliases;
  for (const auto& tensor : tensors) {
    aliases.push_back(alias_of(tensor));
  }
  return aliases;
}

// Wait until gloo is done, and until its thread has let go of the tensors, which it does a moment
// later: the device's memory would be counted as allocated meanwhile, now and then.
void finish_and_release(const WorkPtr& gloo_work) {
  gloo_work->wait();
  while (gloo_work.use_count() > 1) {
    std::this_thread::yield();
  }
}

TensorLists aliases_of(const TensorLists& lists) {
  TensorLists aliases;
  for (const auto& tensors : lists) {
    aliases.push_back(aliases_of(tensors));
  }
  return aliases;
}

Tensors flattened(const TensorLists& lists) {
  Tensors all;
  for (const auto& tensors : lists) {
    all.insert(all.end(), tensors.begin(), tensors.end());
  }
  return all;
}

class SimCcl final : public c10d::Backend {
 public:
  explicit SimCcl(c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override {
    return "simccl";
  }

  void setTimeout(std::chrono::milliseconds timeout) override {
    gloo_->setTimeout(timeout);
  }

  void setSequenceNumberForGroup() override {
    gloo_->setSequenceNumberForGroup();
  }

  uint64_t getSequenceNumberForGroup() override {
    return gloo_->getSequenceNumberForGroup();
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    begin("broadcast");
    auto aliases = aliases_of(tensors);
    return finish(OpType::BROADCAST, gloo_->broadcast(aliases, options), tensors);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& given) override {
    begin("all-reduce");
    auto options = given;
    auto aliases = aliases_of(tensors);
    return reduce_and_scale(OpType::ALLREDUCE, options.reduceOp, tensors, aliases, [&] {
      return gloo_->allreduce(aliases, options);
    });
  }

  WorkPtr allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& given) override {
    begin("coalesced all-reduce");
    auto options = given;
    auto aliases = aliases_of(tensors);
    return reduce_and_scale(OpType::ALLREDUCE_COALESCED, options.reduceOp, tensors, aliases, [&] {
      return gloo_->allreduce_coalesced(aliases, options);
    });
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& given) override {
    begin("reduce");
    auto options = given;
    auto aliases = aliases_of(tensors);
    return reduce_and_scale(OpType::REDUCE, options.reduceOp, tensors, aliases, [&] {
      return gloo_->reduce(aliases, options);
    });
  }

  WorkPtr allgather(
      TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    begin("all-gather");
    auto output_aliases = aliases_of(outputs);
    auto input_aliases = aliases_of(inputs);
    return finish(
        OpType::ALLGATHER,
        gloo_->allgather(output_aliases, input_aliases, options),
        flattened(outputs));
  }

  WorkPtr _allgather_base(
      Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    begin("all-gather");
    auto output_alias = alias_of(output);
    auto input_alias = alias_of(input);
    return finish(
        OpType::_ALLGATHER_BASE,
        gloo_->_allgather_base(output_alias, input_alias, options),
        {output});
  }

  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    begin("coalesced all-gather");
    auto output_aliases = aliases_of(outputs);
    auto input_aliases = aliases_of(inputs);
    return finish(
        OpType::COALESCED,
        gloo_->allgather_into_tensor_coalesced(output_aliases, input_aliases, options),
        outputs);
  }

  WorkPtr gather(
      TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    begin("gather");
    auto output_aliases = aliases_of(outputs);
    auto input_aliases = aliases_of(inputs);
    return finish(
        OpType::GATHER, gloo_->gather(output_aliases, input_aliases, options), flattened(outputs));
  }

  WorkPtr scatter(
      Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) override {
    begin("scatter");
    auto output_aliases = aliases_of(outputs);
    auto input_aliases = aliases_of(inputs);
    return finish(OpType::SCATTER, gloo_->scatter(output_aliases, input_aliases, options), outputs);
  }

  WorkPtr reduce_scatter(
      Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& given) override {
    begin("reduce-scatter");
    auto options = given;
    auto output_aliases = aliases_of(outputs);
    auto input_aliases = aliases_of(inputs);
    return reduce_and_scale(OpType::REDUCE_SCATTER, options.reduceOp, outputs, output_aliases, [&] {
      return gloo_->reduce_scatter(output_aliases, input_aliases, options);
    });
  }

  WorkPtr _reduce_scatter_base(
      Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& given) override {
    begin("reduce-scatter");
    auto options = given;
    auto output_alias = alias_of(output);
    auto input_alias = alias_of(input);
    return reduce_and_scale(
        OpType::_REDUCE_SCATTER_BASE, options.reduceOp, {output}, {output_alias}, [&] {
          return gloo_->_reduce_scatter_base(output_alias, input_alias, options);
        });
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& given) override {
    begin("coalesced reduce-scatter");
    auto options = given;
    auto output_aliases = aliases_of(outputs);
    auto input_aliases = aliases_of(inputs);
    return reduce_and_scale(
        OpType::REDUCE_SCATTER_TENSOR_COALESCED, options.reduceOp, outputs, output_aliases, [&] {
          return gloo_->reduce_scatter_tensor_coalesced(output_aliases, input_aliases, options);
        });
  }

  WorkPtr alltoall_base(
      Tensor& output,
      Tensor& input,
      std::vector<int64_t>& output_sizes,
      std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    begin("all-to-all");
    auto output_alias = alias_of(output);
    auto input_alias = alias_of(input);
    return finish(
        OpType::ALLTOALL_BASE,
        gloo_->alltoall_base(output_alias, input_alias, output_sizes, input_sizes, options),
        {output});
  }

  WorkPtr alltoall(
      Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    begin("all-to-all");
    auto output_aliases = aliases_of(outputs);
    auto input_aliases = aliases_of(inputs);
    return finish(
        OpType::ALLTOALL, gloo_->alltoall(output_aliases, input_aliases, options), outputs);
  }

  // Point to point is left to gloo to finish: two ranks that each send first and receive next would
  // wait for each other here for ever.
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    begin("send");
    auto aliases = aliases_of(tensors);
    return gloo_->send(aliases, to, tag);
  }

  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    begin("receive");
    auto aliases = aliases_of(tensors);
    return gloo_->recv(aliases, from, tag);
  }

  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    begin("receive");
    auto aliases = aliases_of(tensors);
    return gloo_->recvAnysource(aliases, tag);
  }

  WorkPtr barrier(const c10d::BarrierOptions& given) override {
    begin("barrier");
    auto options = given;
    options.device_ids.clear(); // gloo refuses them
    options.device = std::nullopt;
    return finish(OpType::BARRIER, gloo_->barrier(options), {});
  }

 private:
  static void begin(const char* name) {
    TORCH_CHECK(!must_fail(PlannedEvent::Collective), "sim: collective failed (planned): ", name);
    ++counters().collectives;
  }

  static WorkPtr finish(OpType type, const WorkPtr& gloo_work, Tensors results) {
    finish_and_release(gloo_work);
    return c10::make_intrusive<CompletedWork>(type, std::move(results));
  }

  // Gloo knows neither of the two operations that FSDP reduces with: AVG, and the sum of inputs
  // multiplied by a factor first. Both are a sum, scaled afterwards.
  WorkPtr reduce_and_scale(
      OpType type,
      c10d::ReduceOp& op,
      const Tensors& results,
      const Tensors& result_aliases,
      const std::function<WorkPtr()>& run) {
    std::optional<double> factor;
    if (op == c10d::ReduceOp::AVG) {
      factor = 1.0 / getSize();
    } else if (op == c10d::ReduceOp::PREMUL_SUM) {
      const auto* supplement = static_cast<c10d::PreMulSumSupplement*>(op.supplement_.get());
      factor = supplement->tensor_factor.defined() ? supplement->tensor_factor.item<double>()
                                                   : supplement->double_factor;
    }
    if (factor) {
      op = c10d::ReduceOp::SUM;
    }
    finish_and_release(run());
    if (factor) {
      for (const auto& alias : result_aliases) {
        alias.mul_(*factor);
      }
    }
    return c10::make_intrusive<CompletedWork>(type, results);
  }

  const c10::intrusive_ptr<c10d::Backend> gloo_;
};

} // namespace

c10::intrusive_ptr<c10d::Backend> make_simccl(c10::intrusive_ptr<c10d::Backend> gloo) {
  return c10::make_intrusive<SimCcl>(std::move(gloo));
}

} // namespace sim
