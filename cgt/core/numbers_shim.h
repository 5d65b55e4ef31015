// Numbers of a call (numbers.pxi): what a kernel is given of one.
#pragma once
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace cgt {

static constexpr int64_t EXACT = int64_t{1} << 53;  // whole numbers up to here are themselves as floats

// In the order of Form in cgt_core.pxd.
enum {
  FORM_F64, FORM_I64, FORM_F32, FORM_I32, FORM_F16, FORM_BF16, FORM_INVERSE_F64, FORM_INVERSE_F32, FORM_INVERSE_OF_F32
};

template <class T>
static int write_word(char* at, T word) noexcept { memcpy(at, &word, sizeof word); return sizeof word; }

// PyTorch converts a number to the type in which the kernel computes, here as there by a cast. How many bytes it is.
static int form_write(int form, int is_float, double f, int64_t i, char* at) noexcept {
  const double wide = is_float ? f : static_cast<double>(i);
  const float narrow = is_float ? static_cast<float>(f) : static_cast<float>(i);
  switch (form) {
    case FORM_F64: return write_word(at, wide);
    case FORM_I64: return write_word(at, i);
    case FORM_F32: return write_word(at, narrow);
    case FORM_I32: return write_word(at, static_cast<int32_t>(i));
    case FORM_F16: return write_word(at, c10::Half(narrow));
    case FORM_BF16: return write_word(at, c10::BFloat16(narrow));
    case FORM_INVERSE_F64: return write_word(at, 1.0 / wide);
    case FORM_INVERSE_F32: return write_word(at, static_cast<float>(1.0 / wide));
    case FORM_INVERSE_OF_F32: return write_word(at, 1.0f / narrow);
  }
  return 0;
}

}  // namespace cgt
