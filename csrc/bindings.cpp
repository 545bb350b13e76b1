#include "bindings.h"

#include <pybind11/pybind11.h>

PYBIND11_MODULE(_C, m) {
  m.doc() = "Bytes, files, memory and arithmetic of offload; knows nothing of torch.";
  offload::register_faults(m);  // before the handle that takes a plan
  offload::register_io(m);
  offload::register_pinned(m);
  offload::register_kernels(m);  // before those whose defaults are its enums
  offload::register_adam(m);
  offload::register_single_state(m);
  offload::register_split(m);
  offload::register_eight_bit(m);
}
