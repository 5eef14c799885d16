// A word of the caller that travels with the notices of what this thread issues while one
// lives, and what the other ranks said: no message more. Of whoever has values that all
// ranks must have alike and moves them by a collective that takes no words of its own.
#pragma once

#include "device_mesh/collectives/notice.h"

#include <cstdint>
#include <vector>

namespace fsdp::internal {

class PiggybackedWord {
 public:
  explicit PiggybackedWord(uint64_t word);
  ~PiggybackedWord();
  PiggybackedWord(const PiggybackedWord&) = delete;
  PiggybackedWord& operator=(const PiggybackedWord&) = delete;

  // Null: none lives on this thread.
  static PiggybackedWord* current();

  NoticeWords mine() const { return {.agreement = word_}; }
  void heard(const std::vector<NoticeWords>& words) { words_ = words; }
  // Of the last collective, by group rank; empty where nothing was announced, as on
  // devices.
  const std::vector<NoticeWords>& words() const { return words_; }

 private:
  uint64_t word_;
  std::vector<NoticeWords> words_;
  PiggybackedWord* before_;
};

}  // namespace fsdp::internal
