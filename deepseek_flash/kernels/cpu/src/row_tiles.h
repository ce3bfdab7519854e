// Rows that a product takes at once. All tiles but the last few are MOST rows wide; what is left is cut into powers of two
// that have a kernel. 12 k + 4 rows end in 8 + 8 instead of 12 + 4, whose narrow tile would not pay for its loads.
//
//     rows 0 … 11 | 12 … 23 | … | 8 | 4 | 2 | 1
#pragma once
#include <cstdint>

namespace flash {

struct RowTile {
  int64_t first;
  int64_t width;
};

// The tile of a row, when there are so many rows in all.
template <int MOST>
inline RowTile tile_of(int64_t row, int64_t rows) {
  int64_t wide = rows / MOST;
  if (MOST == 12 && wide && rows % MOST == 4) --wide;
  if (row < wide * MOST) return {row / MOST * MOST, MOST};
  constexpr int64_t kNext = MOST > 8 ? 8 : MOST / 2 > 0 ? MOST / 2 : 1;
  int64_t first = wide * MOST;
  for (int64_t width = kNext;;) {
    if (rows - first < width) {
      width /= 2;
    } else if (row < first + width) {
      return {first, width};
    } else {
      first += width;
    }
  }
}

}  // namespace flash
