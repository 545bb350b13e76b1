#include <pybind11/pybind11.h>

#include "bindings.h"

PYBIND11_MODULE(_C, m) {
  m.doc() = "Bytes, files, memory and arithmetic of offload; knows nothing of torch.";
}
