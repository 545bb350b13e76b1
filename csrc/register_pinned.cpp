#include <pybind11/stl.h>

#include "bindings.h"
#include "pinned_memory.h"

namespace py = pybind11;
using py::literals::operator""_a;

namespace offload {
namespace {

// The memory goes back without the GIL: unlocking gigabytes takes long.
struct FreeWithoutGil {
  void operator()(PinnedBuffer* buffer) const {
    const py::gil_scoped_release released;
    std::default_delete<PinnedBuffer>()(buffer);
  }
};

const void* pointer(uintptr_t address) { return reinterpret_cast<const void*>(address); }

}  // namespace

void register_pinned(py::module_& m) {
  py::enum_<Locking>(m, "Locking")
      .value("NONE", Locking::kNone)
      .value("PREFERRED", Locking::kPreferred)
      .value("REQUIRED", Locking::kRequired);

  py::class_<PinnedBuffer, std::unique_ptr<PinnedBuffer, FreeWithoutGil>>(m, "PinnedBuffer",
                                                                          py::buffer_protocol())
      .def(py::init<int64_t, Locking>(), "nbytes"_a, "locking"_a, no_gil())
      .def_property_readonly(
          "address", [](const PinnedBuffer& self) { return reinterpret_cast<uintptr_t>(self.address()); })
      .def_property_readonly("nbytes", &PinnedBuffer::nbytes)
      .def("is_locked", &PinnedBuffer::is_locked)
      .def_buffer([](PinnedBuffer& self) {
        return py::buffer_info(self.address(), 1, py::format_descriptor<uint8_t>::format(), self.nbytes());
      });

  m.def(
      "pinned_free",
      [](uintptr_t address, std::optional<int64_t> nbytes) {
        PinnedMemory::instance().free(pointer(address), nbytes);
      },
      "address"_a, "nbytes"_a.none(true), no_gil());
  m.def(
      "pinned_is_locked",
      [](uintptr_t address, int64_t nbytes) {
        return PinnedMemory::instance().is_locked(pointer(address), nbytes);
      },
      "address"_a, "nbytes"_a, no_gil());
  m.def(
      "pinned_is_managed",
      [](uintptr_t address, int64_t nbytes) {
        return PinnedMemory::instance().is_managed(pointer(address), nbytes);
      },
      "address"_a, "nbytes"_a, no_gil());
  m.def("pinned_totals", [] {
    const PinnedTotals totals = PinnedMemory::instance().totals();
    return py::dict("allocations"_a = totals.allocations, "allocated_bytes"_a = totals.allocated_bytes,
                    "locked_bytes"_a = totals.locked_bytes);
  });
}

}  // namespace offload
