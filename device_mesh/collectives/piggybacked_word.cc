#include "device_mesh/collectives/piggybacked_word.h"

#include <utility>

namespace fsdp::internal {
namespace {

thread_local PiggybackedWord* word_of_thread = nullptr;

}  // namespace

PiggybackedWord::PiggybackedWord(uint64_t word)
    : word_(word), before_(std::exchange(word_of_thread, this)) {}

PiggybackedWord::~PiggybackedWord() { word_of_thread = before_; }

PiggybackedWord* PiggybackedWord::current() { return word_of_thread; }

}  // namespace fsdp::internal
