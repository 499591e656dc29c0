/* Sixteen floats in four registers of NEON; a part of simd.h, with the same order of operations. */
#ifndef CARAVAN_NEON_H
#define CARAVAN_NEON_H

#define ROWS_TILE 4
#define OUTS_TILE 6

typedef struct { float32x4_t a, b, c, d; } v16;

#define V_MAP2(name, op) \
    INLINE v16 name(v16 x, v16 y) { return (v16){op(x.a, y.a), op(x.b, y.b), op(x.c, y.c), op(x.d, y.d)}; }
V_MAP2(v_add, vaddq_f32)
V_MAP2(v_mul, vmulq_f32)
V_MAP2(v_div, vdivq_f32)
/* As in the other variants, y where one of them is NaN. */
INLINE float32x4_t larger(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
V_MAP2(v_max, larger)
INLINE float32x4_t by_sign(float32x4_t x, float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtzq_f32(x), a, b); }
INLINE v16 v_by_sign(v16 x, v16 a, v16 b) {
    return (v16){by_sign(x.a, a.a, b.a), by_sign(x.b, a.b, b.b), by_sign(x.c, a.c, b.c), by_sign(x.d, a.d, b.d)};
}
INLINE v16 v_all(float f) {
    const float32x4_t each = vdupq_n_f32(f);
    return (v16){each, each, each, each};
}
INLINE v16 v_load(const float *p) { return (v16){vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}; }
INLINE void v_store(float *p, v16 x) {
    vst1q_f32(p, x.a), vst1q_f32(p + 4, x.b), vst1q_f32(p + 8, x.c), vst1q_f32(p + 12, x.d);
}
INLINE v16 v_fma(v16 x, v16 y, v16 sum) {
    return (v16){vfmaq_f32(sum.a, x.a, y.a), vfmaq_f32(sum.b, x.b, y.b), vfmaq_f32(sum.c, x.c, y.c),
                 vfmaq_f32(sum.d, x.d, y.d)};
}
INLINE float32x4_t from_shorts(uint16x4_t s) { return vcvtq_f32_u32(vmovl_u16(s)); }
INLINE v16 v_u8(b16 b) {
    const uint16x8_t low = vmovl_u8(vget_low_u8((uint8x16_t)b)), high = vmovl_high_u8((uint8x16_t)b);
    return (v16){from_shorts(vget_low_u16(low)), from_shorts(vget_high_u16(low)), from_shorts(vget_low_u16(high)),
                 from_shorts(vget_high_u16(high))};
}
INLINE float32x4_t from_signed_shorts(int16x4_t s) { return vcvtq_f32_s32(vmovl_s16(s)); }
INLINE v16 v_i8(b16 b) {
    const int16x8_t low = vmovl_s8(vget_low_s8((int8x16_t)b)), high = vmovl_high_s8((int8x16_t)b);
    return (v16){from_signed_shorts(vget_low_s16(low)), from_signed_shorts(vget_high_s16(low)),
                 from_signed_shorts(vget_low_s16(high)), from_signed_shorts(vget_high_s16(high))};
}
INLINE v16 v_half(const void *p) {
    const float16x8_t low = vreinterpretq_f16_u8(vld1q_u8(p));
    const float16x8_t high = vreinterpretq_f16_u8(vld1q_u8((const uint8_t *)p + 16));
    return (v16){vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low), vcvt_f32_f16(vget_low_f16(high)),
                 vcvt_high_f32_f16(high)};
}
/* The nearest halves, ties to even; larger numbers become infinite. */
INLINE void v_store_half(void *to, v16 x) {
    vst1q_u8(to, vreinterpretq_u8_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.a), x.b)));
    vst1q_u8((uint8_t *)to + 16, vreinterpretq_u8_f16(vcvt_high_f16_f32(vcvt_f16_f32(x.c), x.d)));
}
INLINE float32x4_t from_bfloats(uint16x4_t s) { return vreinterpretq_f32_u32(vshll_n_u16(s, 16)); }
INLINE v16 v_bfloat(const void *p) {
    const uint16x8_t low = vreinterpretq_u16_u8(vld1q_u8(p));
    const uint16x8_t high = vreinterpretq_u16_u8(vld1q_u8((const uint8_t *)p + 16));
    return (v16){from_bfloats(vget_low_u16(low)), from_bfloats(vget_high_u16(low)), from_bfloats(vget_low_u16(high)),
                 from_bfloats(vget_high_u16(high))};
}
#define V_MAP(name, op) \
    INLINE v16 name(v16 x) { return (v16){op(x.a), op(x.b), op(x.c), op(x.d)}; }
INLINE float32x4_t even_bfloats(float32x4_t x) { return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(x), 16)); }
INLINE float32x4_t odd_bfloats(float32x4_t x) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0xffff0000)));
}
V_MAP(v_even_bfloats, even_bfloats)
V_MAP(v_odd_bfloats, odd_bfloats)
V_MAP(v_round, vrndnq_f32)
INLINE float v_sum(v16 x) {
    const float32x4_t four = vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
    return vpadds_f32(vadd_f32(vget_low_f32(four), vget_high_f32(four)));
}
INLINE float v_top(v16 x) { return vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(x.a, x.b), vmaxnmq_f32(x.c, x.d))); }
INLINE float32x4_t scale2(float32x4_t x, float32x4_t n) {
    return vmulq_f32(x, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127)), 23)));
}
V_MAP2(v_scale2, scale2)
INLINE b16 b_pick(b16 from, b16 at) { return (b16)vqtbl1q_u8((uint8x16_t)from, (uint8x16_t)at); }
INLINE b32 b_spread(uint32_t fours) {
    uint8x8_t each[4];
    for (int i = 0; i < 4; i++) each[i] = vdup_n_u8((uint8_t)(fours >> 8 * i));
    return b_load32(each);
}

#endif
