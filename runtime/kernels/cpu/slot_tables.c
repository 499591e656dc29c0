/* Lookups in tables with a row for each slot; see runtime/kernels/slot_tables.py. */
#include <stdint.h>

#include "simd.h"

/* entries[r] = page_tokens * table[slot_r][i / page_tokens] + i % page_tokens, i = indices[r], 0 without indices.
 * Returns 1 if an entry would be outside the table, which has `slots` rows of `length`. */
EXPORT int caravan_slot_entries(const int32_t *table, int64_t slots, int64_t length, const int32_t *row_slot,
                                const int64_t *indices, int64_t page_tokens, int64_t rows, int64_t *entries) {
    for (int64_t r = 0; r < rows; r++) {
        const int64_t index = indices ? indices[r] : 0, column = index / page_tokens;
        if (row_slot[r] < 0 || row_slot[r] >= slots || index < 0 || column >= length) return 1;
        entries[r] = page_tokens * table[row_slot[r] * length + column] + index % page_tokens;
    }
    return 0;
}
