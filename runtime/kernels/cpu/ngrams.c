/* Rows of tables of n-grams; see runtime/kernels/ngrams.py. */
#include <stdint.h>

#include "simd.h"

/* y[i][c] = tokens[i] + 1; y [count][columns] */
EXPORT void caravan_token_columns(const int64_t *tokens, int64_t count, int columns, float *y) {
    for (int64_t i = 0; i < count; i++)
        for (int c = 0; c < columns; c++) y[i * columns + c] = (float)(tokens[i] + 1);
}

/* y[i][h] = offsets[h] + the hash of the n-gram of head h that ends with token i, modulo sizes[h]: of two tokens for the
 * first `each` heads, of three for the next ones, and so on. before [count][most - 1]: 1 more than the tokens before
 * tokens[i], the last one first, 0 before the first; those up to `end` count as `end`. */
EXPORT void caravan_ngram_rows(const int64_t *tokens, const float *before, const int64_t *factors, const int64_t *sizes,
                               const int64_t *offsets, int64_t count, int most, int each, int heads, int64_t end,
                               int64_t *y) {
    for (int64_t i = 0; i < count; i++) {
        uint64_t hash = (uint64_t)tokens[i] * (uint64_t)factors[0];
        int ended = 0;
        for (int n = 1; n < most; n++) {
            const int64_t token = (int64_t)before[i * (most - 1) + n - 1] - 1;
            ended |= token < 0 || token == end;
            hash ^= (uint64_t)(ended ? end : token) * (uint64_t)factors[n];
            for (int h = (n - 1) * each; h < n * each; h++)
                y[i * heads + h] = offsets[h] + (int64_t)(hash % (uint64_t)sizes[h]);
        }
    }
}
