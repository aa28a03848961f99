// The few vector operations that attention needs, for AVX-512, AVX2 and, as plain loops, for every other processor.
//
// Which one it is follows from the flags of the ggml-cpu variant that includes this.
#pragma once

#include "simd-mappings.h" // one half to float, as the processor does it best

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define LANEWAY_AVX512 1
#include <immintrin.h>
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define LANEWAY_AVX2 1
#include <immintrin.h>
#endif

namespace laneway {

constexpr uint16_t half_minus_infinity = 0xfc00;

inline float half_to_float(uint16_t half) { return GGML_CPU_FP16_TO_FP32(half); }

// exp(x) = 2^n exp(r) with n = round(x / ln 2) and |r| <= ln 2 / 2, where Taylor's series to the seventh power leaves a
// relative error below 6e-9.  ln 2 is taken off in two parts, of which the first times n is exact.
constexpr float log2_e = 1.44269504f;
constexpr float ln2_high = 0.693359375f; // 355/512
constexpr float ln2_low = -2.12194440e-4f;
constexpr float taylor[] = {1.0f / 5040, 1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
// Below the first, exp is less than the smallest normal number: zero here.
constexpr float exp_lowest = -87.33654f, exp_highest = 88.0f;

#if LANEWAY_AVX512

struct Vector {
    static constexpr int width = 16;
    static constexpr int columns = 4; // accumulators of one head, with four heads at a time

    __m512 v;

    static Vector zero() { return {_mm512_setzero_ps()}; }
    static Vector all(float value) { return {_mm512_set1_ps(value)}; }
    static Vector load(const float *from) { return {_mm512_loadu_ps(from)}; }
    static Vector halves(const uint16_t *from) {
        return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)))};
    }
    static Vector bytes(const int8_t *from) {
        return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from))))};
    }
    void store(float *to) const { _mm512_storeu_ps(to, v); }
    float largest() const { return _mm512_reduce_max_ps(v); }
    float sum() const { return _mm512_reduce_add_ps(v); }
};

inline Vector operator+(Vector a, Vector b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vector operator-(Vector a, Vector b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vector operator*(Vector a, Vector b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vector operator/(Vector a, Vector b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vector fused(Vector a, Vector b, Vector c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Of larger() and smaller(): b where one of them is NaN, on every processor.
inline Vector larger(Vector a, Vector b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vector smaller(Vector a, Vector b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Vector whole(Vector a) {
    return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Vector times_power_of_2(Vector a, Vector n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// Zero where x is below the limit, a elsewhere: where x is NaN, too.
inline Vector unless_below(Vector x, float limit, Vector a) {
    return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, _mm512_set1_ps(limit), _CMP_NLT_UQ), a.v)};
}

// Lane i of the result is the sum of the lanes of vectors[i]: pairs are interleaved and added, four times.
inline Vector sums(const Vector *vectors) {
    __m512 quarter[4];
    for (int i = 0; i < 4; ++i) {
        const Vector *four = vectors + 4 * i;
        const __m512 low = _mm512_add_ps(_mm512_unpacklo_ps(four[0].v, four[1].v), _mm512_unpackhi_ps(four[0].v, four[1].v));
        const __m512 high = _mm512_add_ps(_mm512_unpacklo_ps(four[2].v, four[3].v), _mm512_unpackhi_ps(four[2].v, four[3].v));
        const __m512d a = _mm512_castps_pd(low), b = _mm512_castps_pd(high);
        // In each part of 128 bits: four sums, one of each vector.
        quarter[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const __m512 first = _mm512_add_ps(_mm512_shuffle_f32x4(quarter[0], quarter[1], 0x88),
                                       _mm512_shuffle_f32x4(quarter[0], quarter[1], 0xdd));
    const __m512 second = _mm512_add_ps(_mm512_shuffle_f32x4(quarter[2], quarter[3], 0x88),
                                        _mm512_shuffle_f32x4(quarter[2], quarter[3], 0xdd));
    return {_mm512_add_ps(_mm512_shuffle_f32x4(first, second, 0x88), _mm512_shuffle_f32x4(first, second, 0xdd))};
}

// vectors[i] lane j and vectors[j] lane i change places.
inline void transpose(Vector *vectors) {
    __m512 mixed[16];
    for (int i = 0; i < 16; i += 4) {
        const __m512 a = _mm512_unpacklo_ps(vectors[i].v, vectors[i + 1].v);
        const __m512 b = _mm512_unpackhi_ps(vectors[i].v, vectors[i + 1].v);
        const __m512 c = _mm512_unpacklo_ps(vectors[i + 2].v, vectors[i + 3].v);
        const __m512 d = _mm512_unpackhi_ps(vectors[i + 2].v, vectors[i + 3].v);
        mixed[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(a), _mm512_castps_pd(c)));
        mixed[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(a), _mm512_castps_pd(c)));
        mixed[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(b), _mm512_castps_pd(d)));
        mixed[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(b), _mm512_castps_pd(d)));
    }
    // mixed[4 i + j] holds, in its part k of 128 bits, lane 4 k + j of the vectors 4 i to 4 i + 3.
    for (int j = 0; j < 4; ++j) {
        const __m512 even = _mm512_shuffle_f32x4(mixed[j], mixed[4 + j], 0x88);
        const __m512 odd = _mm512_shuffle_f32x4(mixed[j], mixed[4 + j], 0xdd);
        const __m512 even2 = _mm512_shuffle_f32x4(mixed[8 + j], mixed[12 + j], 0x88);
        const __m512 odd2 = _mm512_shuffle_f32x4(mixed[8 + j], mixed[12 + j], 0xdd);
        vectors[j].v = _mm512_shuffle_f32x4(even, even2, 0x88);
        vectors[4 + j].v = _mm512_shuffle_f32x4(odd, odd2, 0x88);
        vectors[8 + j].v = _mm512_shuffle_f32x4(even, even2, 0xdd);
        vectors[12 + j].v = _mm512_shuffle_f32x4(odd, odd2, 0xdd);
    }
}

// Lane i of a where bit i is set, of b elsewhere.
inline Vector where_set(uint64_t bits, Vector a, Vector b) {
    return {_mm512_mask_mov_ps(b.v, static_cast<__mmask16>(bits), a.v)};
}

#elif LANEWAY_AVX2

struct Vector {
    static constexpr int width = 8;
    static constexpr int columns = 2;

    __m256 v;

    static Vector zero() { return {_mm256_setzero_ps()}; }
    static Vector all(float value) { return {_mm256_set1_ps(value)}; }
    static Vector load(const float *from) { return {_mm256_loadu_ps(from)}; }
    static Vector halves(const uint16_t *from) {
        return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from)))};
    }
    static Vector bytes(const int8_t *from) {
        return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from))))};
    }
    void store(float *to) const { _mm256_storeu_ps(to, v); }
    float largest() const {
        __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        half = _mm_max_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
    }
    float sum() const {
        __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        half = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
    }
};

inline Vector operator+(Vector a, Vector b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vector operator-(Vector a, Vector b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vector operator*(Vector a, Vector b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vector operator/(Vector a, Vector b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vector fused(Vector a, Vector b, Vector c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vector larger(Vector a, Vector b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vector smaller(Vector a, Vector b) { return {_mm256_min_ps(a.v, b.v)}; }
inline Vector whole(Vector a) { return {_mm256_round_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
// n from -126 to 127.
inline Vector times_power_of_2(Vector a, Vector n) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127)), 23);
    return {_mm256_mul_ps(a.v, _mm256_castsi256_ps(exponent))};
}
inline Vector unless_below(Vector x, float limit, Vector a) {
    return {_mm256_and_ps(_mm256_cmp_ps(x.v, _mm256_set1_ps(limit), _CMP_NLT_UQ), a.v)};
}

inline Vector sums(const Vector *vectors) {
    __m256 half[2];
    for (int i = 0; i < 2; ++i) {
        const Vector *four = vectors + 4 * i;
        half[i] = _mm256_hadd_ps(_mm256_hadd_ps(four[0].v, four[1].v), _mm256_hadd_ps(four[2].v, four[3].v));
    }
    return {_mm256_add_ps(_mm256_permute2f128_ps(half[0], half[1], 0x20), _mm256_permute2f128_ps(half[0], half[1], 0x31))};
}

inline void transpose(Vector *vectors) {
    __m256 mixed[8];
    for (int i = 0; i < 8; i += 4) {
        const __m256 a = _mm256_unpacklo_ps(vectors[i].v, vectors[i + 1].v);
        const __m256 b = _mm256_unpackhi_ps(vectors[i].v, vectors[i + 1].v);
        const __m256 c = _mm256_unpacklo_ps(vectors[i + 2].v, vectors[i + 3].v);
        const __m256 d = _mm256_unpackhi_ps(vectors[i + 2].v, vectors[i + 3].v);
        mixed[i] = _mm256_shuffle_ps(a, c, 0x44);
        mixed[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
        mixed[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
        mixed[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
    }
    for (int j = 0; j < 4; ++j) {
        vectors[j].v = _mm256_permute2f128_ps(mixed[j], mixed[4 + j], 0x20);
        vectors[4 + j].v = _mm256_permute2f128_ps(mixed[j], mixed[4 + j], 0x31);
    }
}

inline Vector where_set(uint64_t bits, Vector a, Vector b) {
    const __m256i places = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i these = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits & 0xff)), places);
    const __m256 set = _mm256_castsi256_ps(_mm256_cmpeq_epi32(these, places));
    return {_mm256_blendv_ps(b.v, a.v, set)};
}

#else

// Four lanes: of the compiler's own vectors where it has such, else an array.
struct Vector {
    static constexpr int width = 4;
    static constexpr int columns = 4;

#if defined(__GNUC__) || defined(__clang__)
    typedef float Lanes __attribute__((vector_size(16)));
    typedef int32_t Bits __attribute__((vector_size(16)));
#else
    typedef float Lanes[width];
#endif
    Lanes v;

    static Vector zero() { return all(0.0f); }
    static Vector all(float value) {
        Vector result;
        for (int i = 0; i < width; ++i) {
            result.v[i] = value;
        }
        return result;
    }
    static Vector load(const float *from) {
        Vector result;
        std::memcpy(&result.v, from, sizeof result.v);
        return result;
    }
    static Vector halves(const uint16_t *from) {
        Vector result;
        for (int i = 0; i < width; ++i) {
            result.v[i] = half_to_float(from[i]);
        }
        return result;
    }
    static Vector bytes(const int8_t *from) {
        Vector result;
        for (int i = 0; i < width; ++i) {
            result.v[i] = from[i];
        }
        return result;
    }
    void store(float *to) const { std::memcpy(to, &v, sizeof v); }
    float largest() const {
        float result = v[0];
        for (int i = 1; i < width; ++i) {
            result = v[i] > result ? v[i] : result;
        }
        return result;
    }
    float sum() const { return (v[0] + v[2]) + (v[1] + v[3]); }
};

template <typename Operation> inline Vector each(Operation operation) {
    Vector result;
    for (int i = 0; i < Vector::width; ++i) {
        result.v[i] = operation(i);
    }
    return result;
}

#if defined(__GNUC__) || defined(__clang__)
inline Vector operator+(Vector a, Vector b) { return {a.v + b.v}; }
inline Vector operator-(Vector a, Vector b) { return {a.v - b.v}; }
inline Vector operator*(Vector a, Vector b) { return {a.v * b.v}; }
inline Vector operator/(Vector a, Vector b) { return {a.v / b.v}; }
inline Vector fused(Vector a, Vector b, Vector c) { return {a.v * b.v + c.v}; }
inline Vector chosen(Vector::Bits where, Vector a, Vector b) {
    return {reinterpret_cast<Vector::Lanes>((where & reinterpret_cast<Vector::Bits>(a.v)) |
                                            (~where & reinterpret_cast<Vector::Bits>(b.v)))};
}
inline Vector larger(Vector a, Vector b) { return chosen(a.v > b.v, a, b); }
inline Vector smaller(Vector a, Vector b) { return chosen(a.v < b.v, a, b); }
// n from -126 to 127.
inline Vector times_power_of_2(Vector a, Vector n) {
    // A float of that size has steps of one: its lowest bits are the whole number.
    const Vector::Bits whole_numbers = reinterpret_cast<Vector::Bits>((n + Vector::all(12582912.0f)).v) - 0x4b400000;
    return {a.v * reinterpret_cast<Vector::Lanes>((whole_numbers + 127) << 23)};
}
inline Vector unless_below(Vector x, float limit, Vector a) {
    return chosen(x.v < Vector::all(limit).v, Vector::zero(), a);
}
inline Vector where_set(uint64_t bits, Vector a, Vector b) {
    const Vector::Bits places = {1, 2, 4, 8};
    const Vector::Bits these = places & static_cast<int32_t>(bits & 0xf);
    return chosen(these == places, a, b);
}
#else
inline Vector operator+(Vector a, Vector b) {
    return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline Vector operator-(Vector a, Vector b) {
    return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline Vector operator*(Vector a, Vector b) {
    return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline Vector operator/(Vector a, Vector b) {
    return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline Vector fused(Vector a, Vector b, Vector c) {
    return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline Vector larger(Vector a, Vector b) {
    return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vector smaller(Vector a, Vector b) {
    return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline Vector times_power_of_2(Vector a, Vector n) {
    return each([&](int i) { return std::isnan(n.v[i]) ? n.v[i] : std::ldexp(a.v[i], static_cast<int>(n.v[i])); });
}
inline Vector unless_below(Vector x, float limit, Vector a) {
    return each([&](int i) { return x.v[i] < limit ? 0.0f : a.v[i]; });
}
inline Vector where_set(uint64_t bits, Vector a, Vector b) {
    return each([&](int i) { return bits >> i & 1 ? a.v[i] : b.v[i]; });
}
#endif

// Up to 2^22: beyond 3 * 2^22 floats have steps of one, so adding it rounds.
inline Vector whole(Vector a) {
    const Vector large = Vector::all(12582912.0f);
    return (a + large) - large;
}
inline Vector sums(const Vector *vectors) {
    return each([&](int i) { return vectors[i].sum(); });
}
inline void transpose(Vector *vectors) {
    for (int i = 0; i < Vector::width; ++i) {
        for (int j = 0; j < i; ++j) {
            const float value = vectors[i].v[j];
            vectors[i].v[j] = vectors[j].v[i];
            vectors[j].v[i] = value;
        }
    }
}

#endif

// NaN where a value is not finite, zero elsewhere.
inline Vector fault_of(Vector a) { return a * Vector::zero(); }

// For x up to 88; minus infinity gives zero, NaN gives NaN.
inline Vector exponential(Vector x) {
    const Vector bounded = larger(Vector::all(exp_lowest), smaller(Vector::all(exp_highest), x));
    const Vector n = whole(bounded * Vector::all(log2_e));
    const Vector r = fused(n, Vector::all(-ln2_low), fused(n, Vector::all(-ln2_high), bounded));
    Vector series = Vector::all(taylor[0]);
    for (int i = 1; i < 8; ++i) {
        series = fused(series, r, Vector::all(taylor[i]));
    }
    return unless_below(x, exp_lowest, times_power_of_2(series, n));
}

// 1 - 2 / (exp(2x) + 1): off by some 1e-7, where it is near zero too.
inline Vector hyperbolic_tangent(Vector x) {
    const Vector one = Vector::all(1.0f);
    return one - Vector::all(2.0f) / (exponential(x + x) + one);
}

// Which of 64 cells a row of the mask lets through, as bits, and whether any of those has a value other than zero.
inline uint64_t unmasked_64(const uint16_t *mask, bool &biased) {
    uint64_t bits = 0;
#if LANEWAY_AVX512
    for (int i = 0; i < 2; ++i) {
        const __m512i values = _mm512_loadu_si512(mask + 32 * i);
        const __mmask32 seen = _mm512_cmpneq_epi16_mask(values, _mm512_set1_epi16(static_cast<short>(half_minus_infinity)));
        biased |= _mm512_mask_test_epi16_mask(seen, values, _mm512_set1_epi16(0x7fff)) != 0;
        bits |= static_cast<uint64_t>(seen) << (32 * i);
    }
#elif LANEWAY_AVX2
    const __m256i closed = _mm256_set1_epi16(static_cast<short>(half_minus_infinity));
    __m256i other = _mm256_setzero_si256();
    for (int i = 0; i < 2; ++i) {
        const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(mask + 32 * i));
        const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(mask + 32 * i + 16));
        const __m256i a = _mm256_cmpeq_epi16(first, closed), b = _mm256_cmpeq_epi16(second, closed);
        other = _mm256_or_si256(other, _mm256_or_si256(_mm256_andnot_si256(a, first), _mm256_andnot_si256(b, second)));
        // Packing works on each half of 128 bits: the middle quarters change places.
        const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi16(a, b), 0xd8);
        bits |= static_cast<uint64_t>(~static_cast<uint32_t>(_mm256_movemask_epi8(packed))) << (32 * i);
    }
    biased |= !_mm256_testz_si256(other, _mm256_set1_epi16(0x7fff));
#else
    for (int i = 0; i < 64; ++i) {
        const bool seen = mask[i] != half_minus_infinity;
        bits |= static_cast<uint64_t>(seen) << i;
        biased |= seen && (mask[i] & 0x7fff) != 0;
    }
#endif
    return bits;
}

} // namespace laneway
