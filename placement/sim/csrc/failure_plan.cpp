// The one plan, and what it has seen.
#include "failure_plan.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <mutex>

namespace sim {
namespace {

// Read without the mutex on every allocation and copy, so that no plan costs nothing.
std::atomic<bool> g_plan_is_set{false};

std::mutex g_mutex;
FailurePlan g_plan;
FailureReport g_report;

int index_of(PlannedEvent event) {
  return static_cast<int>(event);
}

} // namespace

void set_failure_plan(const FailurePlan& plan) {
  std::lock_guard<std::mutex> lock(g_mutex);
  TORCH_CHECK(!g_plan_is_set, "sim: a failure plan is active already; plans don't nest");
  g_plan = plan;
  g_report = FailureReport();
  g_plan_is_set = true;
}

void clear_failure_plan() {
  std::lock_guard<std::mutex> lock(g_mutex);
  g_plan_is_set = false;
  g_plan = FailurePlan();
}

FailureReport failure_report() {
  std::lock_guard<std::mutex> lock(g_mutex);
  return g_report;
}

bool must_fail(PlannedEvent event) {
  if (!g_plan_is_set) {
    return false;
  }
  std::lock_guard<std::mutex> lock(g_mutex);
  const auto kind = index_of(event);
  const auto number = ++g_report.seen[kind];
  if (g_plan.fail_at[kind] == number) {
    g_report.fired = true;
    return true;
  }
  return false;
}

std::optional<uint64_t> planned_capacity() {
  if (!g_plan_is_set) {
    return std::nullopt;
  }
  std::lock_guard<std::mutex> lock(g_mutex);
  const auto allocations = g_report.seen[index_of(PlannedEvent::Allocation)];
  if (!g_plan.lower_capacity_at || allocations < *g_plan.lower_capacity_at) {
    return std::nullopt;
  }
  g_report.fired = true;
  return g_plan.lowered_capacity;
}

} // namespace sim
