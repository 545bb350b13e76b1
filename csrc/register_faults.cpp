#include <pybind11/stl.h>

#include "bindings.h"
#include "fault_plan.h"

namespace py = pybind11;
using py::literals::operator""_a;

namespace offload {
namespace {

using Schedule = std::vector<std::pair<int64_t, FaultKind>>;
using HardFault = std::tuple<FaultKind, bool, int64_t, int64_t>;

std::vector<HardFault> hard_faults(const FaultPlan& plan) {
  std::vector<HardFault> found;
  for (const InjectedFault& fault : plan.hard()) {
    found.emplace_back(fault.kind, fault.writing, fault.offset, fault.nbytes);
  }
  return found;
}

}  // namespace

void register_faults(py::module_& m) {
  py::enum_<FaultKind>(m, "FaultKind")
      .value("EIO", FaultKind::kEio)
      .value("ENOSPC", FaultKind::kEnospc)
      .value("EAGAIN", FaultKind::kEagain)
      .value("EINTR", FaultKind::kEintr)
      .value("SHORT", FaultKind::kShort)
      .value("DELAY", FaultKind::kDelay)
      .value("REORDER", FaultKind::kReorder)
      .value("BUSY", FaultKind::kBusy)
      .value("BROKEN", FaultKind::kBroken);

  py::class_<FaultPlan, std::shared_ptr<FaultPlan>>(m, "FaultPlan")
      .def(py::init([](uint64_t seed, const std::map<FaultKind, double>& rates, const Schedule& scheduled,
                       double delay_seconds) {
             return std::make_shared<FaultPlan>(
                 FaultPlan::Settings{seed, rates, {scheduled.begin(), scheduled.end()}, delay_seconds});
           }),
           "seed"_a, "rates"_a, "scheduled"_a, "delay_seconds"_a)
      .def("counts", &FaultPlan::counts)
      .def("hard", &hard_faults);
}

}  // namespace offload
