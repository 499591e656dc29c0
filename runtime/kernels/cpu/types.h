/* GGUF's ids of block types. */
#ifndef CARAVAN_TYPES_H
#define CARAVAN_TYPES_H

enum {
    F32 = 0, F16 = 1, BF16 = 30,
    Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8,
    Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14,
    IQ1_S = 19, IQ1_M = 29, IQ2_XXS = 16, IQ2_XS = 17, IQ2_S = 22, IQ3_XXS = 18, IQ3_S = 21,
    IQ4_NL = 20, IQ4_XS = 23, TQ1_0 = 34, TQ2_0 = 35, MXFP4 = 39, NVFP4 = 40,
    BF16_ROUNDED = 31, /* formerly Q4_0_4_4; BF16 times activations that are rounded to bfloat16 */
    MXFP4_PAIRS = 4, /* formerly Q4_2; MXFP4 with adjacent elements in one byte */
    Q16_0 = 5, /* formerly Q4_3; an exponent and 32 numbers of 16 bits, made of F16 and BF16 */
};

/* The id of a type in tiles is this much greater (integers_tiled.c); the type in files of any id. */
enum { IN_TILES = 2000 };
static inline int file_type(int type) { return type < IN_TILES ? type : type - IN_TILES; }

#endif
