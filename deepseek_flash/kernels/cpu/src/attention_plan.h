// How attention is cut into work. Keys are cut at fixed positions into partitions, partitions into tiles:
//
//     position   0 ........ 63 | 64 ...... 127 | 128 ..... 191 | 192 ..... 255 | 256 ...
//                [   tile     ]  [   tile     ]  [   tile     ]  [   tile     ]  [ …
//                [                        partition                          ]  [ …
//
// A row (one query head of one token) goes over its keys tile by tile with a running maximum and sum; every partition
// starts anew and is then merged into the row's result, partitions in order. Two kinds of items do exactly this:
//
//     sweep   some tokens of one sequence, one kv head, all partitions one after the other: for prefill
//     split   one partition of one or several sequences, one kv head; the parts are merged afterwards: for decode.
//             Sequences whose tables agree on the whole partition share an item, so their keys are read once.
//
// Which kind a row gets changes nothing in its numbers, and neither do its neighbours.
#pragma once
#include <cstdint>

#include "flash.h"

namespace flash {

constexpr int64_t kTile = 64;
constexpr int64_t kPartition = 256;
constexpr int64_t kSplitTokens = 4;  // sequences with at most so many new tokens are split, if their rows fit an item
constexpr int64_t kMostDim = 2048, kMostGroup = 4096;  // of a head; query heads of a kv head
constexpr int64_t kItemRows = 96;    // rows of one item, at least one token's

struct AttentionItem {
  int32_t partition;  // -1: sweep
  int32_t kv_head;
  int32_t first;      // sweep: first token (row of q); split: index into members
  int32_t count;      // tokens; members
  int32_t sequence;   // sweep: whose; split: whose block table to read
};

struct AttentionPlan {
  int32_t heads, kv_heads, group, dim, padded_dim, block_size, dtype, kv_group;
  int64_t item_rows;
  const flash_step* step;
  int64_t items, splits, members;
  AttentionItem* item;
  int32_t* member;      // sequences of split items
  int32_t* split;       // [splits] sequences whose parts are merged
  int64_t* part_row;    // [sequences] first part of a split sequence: parts are [token][head][partition]
  float* part;          // [parts, padded_dim + 2]: weighted values, maximum, sum
  char* buffers;        // one a thread
  int64_t buffer_bytes;
};

// One layer's call.
struct AttentionJob {
  const AttentionPlan& plan;
  const flash_cache& cache;
  const float* q;
  float scale;
  float* out;
};

static inline int64_t partitions(int64_t context) { return (context + kPartition - 1) / kPartition; }

}  // namespace flash
