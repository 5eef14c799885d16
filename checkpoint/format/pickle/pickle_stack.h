// The memory of the machine that a pickle is a program of: the values that it has made, a
// stack of them with marks, and a memo of those that it recalls by number.
#pragma once

#include "checkpoint/format/pickle/pickle.h"

#include <cstddef>
#include <deque>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fsdp::internal::checkpoint {

// What needs a value or a mark that is not there throws std::runtime_error.
class PickleStack {
 public:
  // A new value that is not on the stack. Throws std::runtime_error for more than 2^24.
  Pickled* make(Pickled&& value);
  void push(Pickled&& value) { stack_.push_back(make(std::move(value))); }
  void push_mark() { stack_.push_back(nullptr); }
  // The value at the top once more.
  void push_again() { stack_.push_back(top()); }

  Pickled* top() const;
  Pickled* pop();
  // In the order in which they were pushed.
  std::vector<const Pickled*> pop_some(size_t count);
  // What was pushed since the last mark, which goes too.
  std::vector<const Pickled*> pop_to_mark();
  // Removes a value, or a mark.
  void drop();

  // Keeps the value at the top under a number; by default, how many are kept already.
  void remember() { remember(memo_.size()); }
  void remember(size_t index) { memo_[index] = top(); }
  // Pushes what was kept.
  void recall(size_t index);

  // To be called before a few bytes of the file copy many of what it holds already.
  // Throws std::runtime_error for more than 2^28 bytes in all.
  void count_copied(size_t bytes);

  // All values, in the order in which they were made; pointers to them stay good.
  std::deque<Pickled> take_values() { return std::move(values_); }

 private:
  std::deque<Pickled> values_;
  std::vector<Pickled*> stack_;  // null: a mark
  std::unordered_map<size_t, Pickled*> memo_;
  size_t copied_bytes_ = 0;
};

}  // namespace fsdp::internal::checkpoint
