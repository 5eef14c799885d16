#include "device_mesh/collectives/word_beside.h"

#include <utility>

namespace fsdp::internal {
namespace {

thread_local WordBeside* word_of_thread = nullptr;

}  // namespace

WordBeside::WordBeside(uint64_t word) : word_(word), before_(std::exchange(word_of_thread, this)) {}

WordBeside::~WordBeside() { word_of_thread = before_; }

WordBeside* WordBeside::current() { return word_of_thread; }

}  // namespace fsdp::internal
