// The machine that a pickle is a program of: a stack, a memo and what each opcode does to
// them. It builds Pickled values and runs nothing.
#pragma once

#include "checkpoint/format/pickle.h"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fsdp::internal::checkpoint {

struct CutOffPickle : std::runtime_error {
  CutOffPickle() : std::runtime_error("it is cut off") {}
};

// Throws std::runtime_error; Pickle::parse() makes a status of it.
class PickleParser {
  using Kind = Pickled::Kind;

 public:
  explicit PickleParser(std::string_view bytes) : rest_(bytes) {}

  Pickle run() {
    const size_t bytes = rest_.size();
    for (;;) {
      const auto opcode = static_cast<unsigned char>(take(1)[0]);
      if (opcode == '.') break;
      const auto found = kOpcodes.find(opcode);
      if (found == kOpcodes.end()) {
        throw std::runtime_error("opcode " + std::to_string(opcode) +
                                 " is of no pickle that holds tensors");
      }
      found->second(*this);
    }
    pickle_.root_ = pop();
    pickle_.bytes_ = bytes - rest_.size();
    return std::move(pickle_);
  }

 private:
  static constexpr size_t kMostNodes = size_t{1} << 24;
  static constexpr size_t kMostCopiedBytes = size_t{1} << 28;

  std::string_view take(uint64_t count) {
    if (count > rest_.size()) throw CutOffPickle();
    const std::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return taken;
  }
  // Little-endian.
  template <class Number>
  Number number() {
    Number value = 0;
    std::memcpy(&value, take(sizeof(value)).data(), sizeof(value));
    return value;
  }
  std::string line() {
    const size_t end = rest_.find('\n');
    if (end == std::string_view::npos) throw CutOffPickle();
    const std::string text(take(end));
    take(1);
    return text;
  }

  Pickled* push(Pickled node) {
    if (pickle_.nodes_.size() == kMostNodes) throw std::runtime_error("it holds too much");
    pickle_.nodes_.push_back(std::move(node));
    stack_.push_back(&pickle_.nodes_.back());
    return stack_.back();
  }
  // Before a few bytes of the file copy many of what it holds already.
  void count_copied(size_t bytes) {
    copied_bytes_ += bytes;
    if (copied_bytes_ > kMostCopiedBytes) throw std::runtime_error("it holds too much");
  }
  void push_int(int64_t value) { push({.kind = Kind::kInt, .integer = value}); }
  void push_bool(bool value) { push({.kind = Kind::kBool, .integer = value}); }
  void push_text(uint64_t length) {
    push({.kind = Kind::kString, .text = std::string(take(length))});
  }
  // As repr() writes it; escapes stay.
  void push_quoted() {
    const std::string text = line();
    const bool is_quoted = text.size() >= 2 && text.front() == text.back();
    push({.kind = Kind::kString, .text = is_quoted ? text.substr(1, text.size() - 2) : text});
  }
  Pickled* top() {
    if (stack_.empty() || stack_.back() == nullptr) throw std::runtime_error("a value is missing");
    return stack_.back();
  }
  Pickled* pop() {
    Pickled* const value = top();
    stack_.pop_back();
    return value;
  }
  void push_again() { stack_.push_back(top()); }
  // A value, or a mark.
  void drop() {
    if (stack_.empty()) throw std::runtime_error("a value is missing");
    stack_.pop_back();
  }
  // What was pushed since the last mark, which goes too.
  std::vector<const Pickled*> pop_to_mark() {
    size_t mark = stack_.size();
    while (mark > 0 && stack_[mark - 1] != nullptr) --mark;
    if (mark == 0) throw std::runtime_error("a mark is missing");
    const auto first = stack_.begin() + static_cast<std::ptrdiff_t>(mark);
    std::vector<const Pickled*> values(first, stack_.end());
    stack_.resize(mark - 1);
    return values;
  }
  std::vector<const Pickled*> pop_some(size_t count) {
    std::vector<const Pickled*> values(count);
    while (count > 0) values[--count] = pop();
    return values;
  }

  // Two's complement, little-endian.
  void push_long(uint64_t length) {
    const auto bytes = take(length);
    if (bytes.size() > sizeof(int64_t)) {
      push({.kind = Kind::kLong, .text = std::string(bytes)});
      return;
    }
    int64_t value = !bytes.empty() && (bytes.back() & 0x80) != 0 ? -1 : 0;
    std::memcpy(&value, bytes.data(), bytes.size());
    push_int(value);
  }
  // "12", or "12L" as Python 2 wrote it, "00" and "01" for False and True.
  void push_digits() {
    std::string text = line();
    if (text == "00" || text == "01") {
      push_bool(text == "01");
      return;
    }
    if (text.ends_with('L')) text.pop_back();
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (end != text.data() + text.size()) throw std::runtime_error("an integer is malformed");
    if (error == std::errc()) {
      push_int(value);
    } else {
      push({.kind = Kind::kLong, .text = std::move(text)});
    }
  }
  void push_decimal() {
    const std::string text = line();
    push({.kind = Kind::kDouble, .number = std::strtod(text.c_str(), nullptr)});
  }
  void push_double() {
    const auto bytes = take(sizeof(double));
    char reversed[sizeof(double)];
    for (size_t i = 0; i < sizeof(double); ++i) reversed[i] = bytes[sizeof(double) - 1 - i];
    double value = 0;
    std::memcpy(&value, reversed, sizeof(value));
    push({.kind = Kind::kDouble, .number = value});
  }

  void remember(size_t index) { memo_[index] = top(); }
  size_t line_index() {
    const std::string text = line();
    size_t index = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), index);
    if (error != std::errc() || text.empty()) throw std::runtime_error("a memo has no number");
    return index;
  }
  void recall(size_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) throw std::runtime_error("a value is recalled that was not kept");
    stack_.push_back(found->second);
  }

  void push_sequence(std::vector<const Pickled*> items) {
    push({.kind = Kind::kSequence, .items = std::move(items)});
  }
  void push_set(std::vector<const Pickled*> items) {
    push({.kind = Kind::kSet, .items = std::move(items)});
  }
  // To a list or set, or to an object of a class made of a list, whose entries have
  // indices as keys.
  void append(const std::vector<const Pickled*>& values) {
    Pickled* const list = top();
    const bool is_plain = list->is(Kind::kSequence) || list->is(Kind::kSet);
    if (!is_plain && !list->is(Kind::kCall)) {
      throw std::runtime_error("it appends to what is no list");
    }
    if (is_plain) {
      list->items.insert(list->items.end(), values.begin(), values.end());
      return;
    }
    for (const Pickled* value : values) {
      push_int(static_cast<int64_t>(list->entries.size()));
      const Pickled* const index = pop();
      list->entries.emplace_back(index, value);
    }
  }
  void set_items(const std::vector<const Pickled*>& values) {
    Pickled* const dict = top();
    if (!dict->is(Kind::kDict) && !dict->is(Kind::kCall)) {
      throw std::runtime_error("it sets items of what is no dictionary");
    }
    if (values.size() % 2 != 0) throw std::runtime_error("a key has no value");
    for (size_t i = 0; i < values.size(); i += 2) {
      dict->entries.emplace_back(values[i], values[i + 1]);
    }
  }

  void push_dict(const std::vector<const Pickled*>& values) {
    push({.kind = Kind::kDict});
    set_items(values);
  }
  void push_global() {
    const std::string module = line();
    push({.kind = Kind::kGlobal, .text = module + " " + line()});
  }
  void push_stack_global() {
    const auto names = pop_some(2);
    if (!names[0]->is(Kind::kString) || !names[1]->is(Kind::kString)) {
      throw std::runtime_error("a class without a name");
    }
    count_copied(names[0]->text.size() + names[1]->text.size());
    push({.kind = Kind::kGlobal, .text = names[0]->text + " " + names[1]->text});
  }
  void push_call() {
    auto callee_and_arguments = pop_some(2);
    if (!callee_and_arguments[1]->is(Kind::kSequence)) {
      throw std::runtime_error("a call without arguments");
    }
    push({.kind = Kind::kCall, .items = std::move(callee_and_arguments)});
  }
  void push_new() {
    push_call();
    top()->is_new = true;
  }
  // With a dictionary of named arguments, which become entries.
  void push_call_with_names() {
    const Pickled* const names = pop();
    push_new();
    count_copied(names->entries.size() * sizeof(names->entries[0]));
    top()->entries = names->entries;
  }
  // A class and its arguments, all since the mark.
  void push_object() {
    auto values = pop_to_mark();
    if (values.empty()) throw std::runtime_error("a call of nothing");
    const Pickled* const callee = values.front();
    values.erase(values.begin());
    push_sequence(std::move(values));
    const Pickled* const arguments = pop();
    push({.kind = Kind::kCall, .items = {callee, arguments}});
  }
  // The same where the class's name stands in the opcode.
  void push_instance() {
    push_global();
    const Pickled* const callee = pop();
    push_sequence(pop_to_mark());
    const Pickled* const arguments = pop();
    push({.kind = Kind::kCall, .items = {callee, arguments}});
  }
  void push_persistent_line() {
    push({.kind = Kind::kString, .text = line()});
    push({.kind = Kind::kPersistent, .items = pop_some(1)});
  }
  void build() {
    const Pickled* const state = pop();
    top()->state = state;
  }

  static const std::map<unsigned char, void (*)(PickleParser&)> kOpcodes;

  std::string_view rest_;
  Pickle pickle_;
  size_t copied_bytes_ = 0;
  std::vector<Pickled*> stack_;  // null: a mark
  std::unordered_map<size_t, Pickled*> memo_;
};

}  // namespace fsdp::internal::checkpoint
