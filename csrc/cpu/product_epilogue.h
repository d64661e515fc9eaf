// Epilogue of a tile of logits: exponentials, their sums, the largest logit.
#pragma once

#include "product_pack.h"
#include "product_tile.h"

namespace exgrpo::EXGRPO_VARIANT {

constexpr float kUnderflown = -1e4f;  // replaces every d below it: exp(d) and exp(d) d are 0, even for d = -inf
constexpr float kLog2E = 1.44269504f;
constexpr float kLn2 = 0.693147181f;

// 2^t to an ulp; 0 far below the normal numbers, NaN for NaN and infinity.
inline __m512 exp2(__m512 t) {
  const __m512 whole = _mm512_roundscale_ps(t, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m512 r = _mm512_sub_ps(t, whole);
  constexpr float coefficients[] = {0x1.5f456ap-10f, 0x1.3b2dbcp-7f, 0x1.c6aed4p-5f,
                                    0x1.ebfbdap-3f,  0x1.62e430p-1f, 1.0f};
  __m512 power = _mm512_set1_ps(0x1.41d334p-13f);
  for (const float c : coefficients) power = _mm512_fmadd_ps(power, r, _mm512_set1_ps(c));
  return _mm512_scalef_ps(power, whole);
}

// log2(x) of positive x to 2e-6: three digits more than a bfloat16 x has.
inline __m512 log2(__m512 x) {
  const __m512 mantissa = _mm512_getmant_ps(x, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_src);
  const __m512 exponent = _mm512_getexp_ps(_mm512_div_ps(x, mantissa));
  const __m512 r = _mm512_sub_ps(mantissa, _mm512_set1_ps(1.0f));
  constexpr float coefficients[] = {-0.244879335f, 0.298357457f,  -0.361360103f,
                                    0.480609983f,  -0.721331954f, 1.44269645f};
  __m512 quotient = _mm512_set1_ps(0.122803263f);
  for (const float c : coefficients) quotient = _mm512_fmadd_ps(quotient, r, _mm512_set1_ps(c));
  return _mm512_fmadd_ps(quotient, r, exponent);
}

// S and M / ln 2 of a row over some tiles, lane by lane.
struct alignas(64) LaneSums {
  float rest[kVector];
  float moment[kVector];
};

// Adds the exponentials of a tile's row to its sums; returns them.
inline __m512i exponentials(const float* logits, const float* bias, float anchor, float scale, LaneSums& sums) {
  const __m512 anchors = _mm512_set1_ps(anchor), scales = _mm512_set1_ps(scale);
  const __m512 least = _mm512_set1_ps(kUnderflown);
  __m512 rest = _mm512_load_ps(sums.rest), moment = _mm512_load_ps(sums.moment);
  __m512 power[kVectors];
  for (int j = 0; j < kVectors; ++j) {
    const __m512 z = _mm512_add_ps(_mm512_load_ps(logits + j * kVector), _mm512_load_ps(bias + j * kVector));
    const __m512 t = _mm512_mul_ps(_mm512_sub_ps(z, anchors), scales);
    const __m512 bounded = _mm512_max_ps(least, t);  // returns its second operand if one is NaN
    power[j] = exp2(bounded);
    rest = _mm512_add_ps(rest, power[j]);
    moment = _mm512_fmadd_ps(power[j], bounded, moment);
  }
  _mm512_store_ps(sums.rest, rest);
  _mm512_store_ps(sums.moment, moment);
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(power[1], power[0]));
}

// exp(d) (c + h (d - U)) of entries of a row.
inline __m512 entropy_factor(__m512 power, __m512 log_prob, __m512 entropy, __m512 mean) {
  const __m512 d = _mm512_mul_ps(log2(power), _mm512_set1_ps(kLn2));
  const __m512 factor = _mm512_fmadd_ps(entropy, _mm512_sub_ps(d, mean), log_prob);
  const __mmask16 positive = _mm512_cmp_ps_mask(power, _mm512_setzero_ps(), _CMP_NEQ_UQ);
  return _mm512_maskz_mul_ps(positive, power, factor);
}

}  // namespace exgrpo::EXGRPO_VARIANT
