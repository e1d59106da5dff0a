// Failures on request: the n-th allocation, copy or collective fails, once, or the capacity drops
// at the n-th allocation. A test counts the events of a run without failures, then repeats the run
// once for each of them.
//
// One plan at a time for the whole process, because the backward pass runs on autograd's threads.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace sim {

enum class PlannedEvent { Allocation, Copy, Collective };
constexpr int kPlannedEventKinds = 3;

struct FailurePlan {
  // 1-based, counted from the moment the plan is set; absent: never.
  std::optional<uint64_t> fail_at[kPlannedEventKinds];
  std::optional<uint64_t> lower_capacity_at; // an allocation
  uint64_t lowered_capacity = 0; // bytes
};

struct FailureReport {
  uint64_t seen[kPlannedEventKinds] = {};
  bool fired = false;
};

// Raises if a plan is set already.
void set_failure_plan(const FailurePlan& plan);
void clear_failure_plan();
FailureReport failure_report();

// Counts one event against the plan. True: this very event has to fail.
bool must_fail(PlannedEvent event);

// To ask after `must_fail(Allocation)`: the capacity in bytes that holds from this allocation on.
std::optional<uint64_t> planned_capacity();

} // namespace sim
