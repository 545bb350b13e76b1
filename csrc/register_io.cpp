#include <pybind11/stl.h>

#include "backend.h"
#include "bindings.h"
#include "error.h"
#include "io_handle.h"

namespace py = pybind11;
using py::literals::operator""_a;

namespace offload {
namespace {

// Address, nbytes, file, offset: what Python knows of an extent.
using ExtentArgs = std::tuple<uintptr_t, int64_t, std::shared_ptr<File>, int64_t>;

// Names may hold bytes that are no UTF-8; Python carries them as surrogates.
py::object decode_path(const std::string& path) {
  return py::reinterpret_steal<py::object>(
      PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(path.size())));
}

py::object python_error(const IoFailure& failure) {
  const py::object make = py::module_::import("offload.errors").attr("io_error");
  return make(failure.code, failure.call, decode_path(failure.path), "offset"_a = failure.offset,
              "nbytes_wanted"_a = failure.nbytes_wanted, "nbytes_moved"_a = failure.nbytes_moved);
}

void translate_io_error(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const IoError& error) {
    const py::object value = python_error(error.failure());
    PyErr_SetObject(py::type::of(value).ptr(), value.ptr());
  }
}

template <class Owned>
struct DestroyWithoutGil {
  void operator()(Owned* owned) const {
    const py::gil_scoped_release released;
    std::default_delete<Owned>()(owned);
  }
};

std::shared_ptr<Transfer> submit(IoHandle& handle, bool writing, const std::vector<ExtentArgs>& args) {
  std::vector<Extent> extents;
  extents.reserve(args.size());
  for (const auto& [address, nbytes, file, offset] : args) {
    auto* start = reinterpret_cast<char*>(address);
    extents.push_back({start, nbytes, file, offset, PinnedLease(start, nbytes)});
  }
  return handle.submit(writing, std::move(extents));
}

py::dict stats_of(const IoHandle& handle) {
  const IoCounters& counters = handle.counters();
  return py::dict(
      "bytes_read"_a = counters.bytes_read.load(), "bytes_written"_a = counters.bytes_written.load(),
      "requests"_a = counters.requests.load(), "direct_bytes"_a = counters.direct_bytes.load(),
      "buffered_bytes"_a = counters.buffered_bytes.load(), "bounced_bytes"_a = counters.bounced_bytes.load(),
      "short_transfers"_a = counters.short_transfers.load(),
      "direct_fallbacks"_a = counters.direct_fallbacks.load(), "failures"_a = counters.failures.load());
}

void register_file(py::module_& m) {
  py::enum_<FileMode>(m, "FileMode")
      .value("READ", FileMode::kRead)
      .value("WRITE", FileMode::kWrite)
      .value("READ_WRITE", FileMode::kReadWrite);

  py::class_<File, std::shared_ptr<File>>(m, "File")
      .def(py::init<const std::string&, FileMode, bool>(), "path"_a, "mode"_a, "direct"_a, no_gil())
      .def_static(
          "of_descriptor", [](int fd, FileMode mode) { return std::make_shared<File>(fd, mode); }, "fd"_a,
          "mode"_a, no_gil())
      .def_property_readonly("path", [](const File& self) { return decode_path(self.path()); })
      .def_property_readonly("is_direct", &File::is_direct)
      .def_property_readonly("memory_alignment", &File::memory_alignment)
      .def_property_readonly("offset_alignment", &File::offset_alignment)
      .def("nbytes", &File::nbytes, no_gil())
      .def("preallocate", &File::preallocate, "nbytes"_a, no_gil())
      .def("sync", &File::sync, no_gil());
}

void register_transfer(py::module_& m) {
  py::class_<Transfer, std::shared_ptr<Transfer>>(m, "Transfer")
      .def_property_readonly("id", &Transfer::id)
      .def_property_readonly("nbytes", &Transfer::nbytes)
      .def_property_readonly("nbytes_moved", &Transfer::nbytes_moved)
      .def("done", &Transfer::done)
      .def("wait_for", &Transfer::wait_for, "seconds"_a, no_gil())
      .def("error", [](const Transfer& self) -> py::object {
        if (!self.done() || !self.failure()) return py::none();
        return python_error(*self.failure());
      });
}

void register_handle(py::module_& m) {
  py::class_<IoHandle, std::unique_ptr<IoHandle, DestroyWithoutGil<IoHandle>>>(m, "IoHandle")
      .def(py::init([](const std::string& backend, int64_t block_size, int64_t queue_depth,
                       int64_t thread_count, std::shared_ptr<FaultPlan> faults) {
             return std::unique_ptr<IoHandle, DestroyWithoutGil<IoHandle>>(
                 new IoHandle({backend, block_size, queue_depth, thread_count, std::move(faults)}));
           }),
           "backend"_a, "block_size"_a, "queue_depth"_a, "thread_count"_a, "faults"_a = nullptr, no_gil())
      .def_property_readonly("backend", &IoHandle::backend)
      .def_property_readonly("backend_reason", &IoHandle::backend_reason)
      .def_property_readonly("block_size", &IoHandle::block_size)
      .def_property_readonly("queue_depth", &IoHandle::queue_depth)
      .def("open", &IoHandle::open, "path"_a, "writing"_a, no_gil())
      .def("submit", &submit, "writing"_a, "extents"_a, no_gil())
      .def("take_finished", &IoHandle::take_finished, no_gil())
      .def("take_notices", &IoHandle::take_notices, no_gil())
      .def("stats", &stats_of)
      .def("close", &IoHandle::close, no_gil());
}

}  // namespace

void register_io(py::module_& m) {
  py::register_exception_translator(&translate_io_error);
  register_file(m);
  register_transfer(m);
  register_handle(m);
  m.def("probe_backends", [] {
    py::list probes;
    for (const BackendProbe& probe : probe_backends()) {
      probes.append(py::make_tuple(probe.name, probe.usable, probe.detail));
    }
    return probes;
  });
}

}  // namespace offload
