// Batches of a text, cut into windows of one length. One window in twenty is held out
// for validation; an epoch has each of the others once, in an order by seed and epoch.
//
//   const Batches batches(tokens_of(path), {.seed = 1, .tokens = 128, .vocab = 256});
//   auto batch = batches.training(step, {.first = rank * 8, .count = 8, .global = ranks * 8});
//
// What a global batch has depends on the seed, the step and its number of rows alone, so
// 2 ranks x 4 rows see what 1 rank x 8 rows sees, and a run that is resumed at another
// number of ranks goes on where it stopped. A step is all that a checkpoint has to keep.
#pragma once

#include "programs/trainer/data/tokens.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace programs {

struct Batch {
  at::Tensor inputs;   // int64 [rows, tokens]
  at::Tensor targets;  // int64 [rows, tokens]: inputs, one token later

  // With Packing::kSeparate: bool [rows, tokens], where documents begin (documents.h).
  // The first token of a document is no target, since nothing before tells of it: it is
  // kNoTarget (transformer.h).
  at::Tensor begins = {};
  int64_t target_count = 0;  // that are not kNoTarget

  Batch to(c10::Device device) const;
};

// Of a global batch.
struct BatchRows {
  int64_t first, count;
  int64_t global;  // rows of all ranks
};

// What the documents in one window are to each other.
enum class Packing { kJoined, kSeparate };

struct BatchOptions {
  uint64_t seed = 1;
  int64_t tokens = 128;  // of a window
  int64_t vocab = 256;   // all tokens are below
  Packing packing = Packing::kJoined;
};

class Batches {
 public:
  // Throws ValueError where the text has fewer than 20 windows.
  Batches(std::unique_ptr<Tokens> text, BatchOptions options);

  // `step` from 1. Local; throws as Tokens::read.
  Batch training(int64_t step, const BatchRows& rows) const;
  // `index` from 0; held-out windows come again where there are fewer.
  Batch held_out(int64_t index, const BatchRows& rows) const;

  int64_t training_tokens() const { return training_windows_ * options_.tokens; }
  int64_t held_out_tokens() const { return held_out_windows_ * options_.tokens; }

 private:
  template <class WindowOf>
  Batch cut(const BatchRows& rows, const WindowOf& window_of) const;
  // Of the window's tokens and the one after, where documents begin.
  std::vector<int64_t> begins_in(int64_t window) const;
  template <class WindowOf>
  void separate(Batch& batch, const BatchRows& rows, const WindowOf& window_of) const;

  std::unique_ptr<Tokens> text_;
  BatchOptions options_;
  int64_t training_windows_, held_out_windows_;
};

// The place that `index` has among `count` in the order that `key` draws: each place
// once.
int64_t shuffled(int64_t index, int64_t count, uint64_t key);

}  // namespace programs
