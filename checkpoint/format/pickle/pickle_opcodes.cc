#include "checkpoint/format/pickle/pickle_opcodes.h"

#include "checkpoint/format/pickle/pickle.h"

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace fsdp::internal::checkpoint {
namespace {

using Kind = Pickled::Kind;
using Values = std::vector<const Pickled*>;

// Numbers and texts as opcodes write them: as bytes, or as a line of text in protocol 0.

Pickled pickled_bool(bool value) { return {.kind = Kind::kBool, .integer = value}; }

Pickled pickled_integer(int64_t value) { return {.kind = Kind::kInt, .integer = value}; }

Pickled pickled_text(std::string text) { return {.kind = Kind::kString, .text = std::move(text)}; }

// Two's complement, little-endian, of any length.
Pickled integer_from_bytes(std::string_view bytes) {
  if (bytes.size() > sizeof(int64_t)) return {.kind = Kind::kLong, .text = std::string(bytes)};
  int64_t value = !bytes.empty() && (bytes.back() & 0x80) != 0 ? -1 : 0;
  std::memcpy(&value, bytes.data(), bytes.size());
  return pickled_integer(value);
}

// "12", or "12L" as Python 2 wrote it, "00" and "01" for False and True. Throws
// std::runtime_error for what has anything else in it.
Pickled integer_from_line(std::string line) {
  if (line == "00" || line == "01") return pickled_bool(line == "01");
  if (line.ends_with('L')) line.pop_back();
  int64_t value = 0;
  const auto [end, error] = std::from_chars(line.data(), line.data() + line.size(), value);
  if (end != line.data() + line.size()) throw std::runtime_error("an integer is malformed");
  if (error != std::errc()) return {.kind = Kind::kLong, .text = std::move(line)};
  return pickled_integer(value);
}

// Big-endian. REQUIRES: 8 bytes.
Pickled double_from_bytes(std::string_view bytes) {
  char reversed[sizeof(double)];
  for (size_t i = 0; i < sizeof(double); ++i) reversed[i] = bytes[sizeof(double) - 1 - i];
  double value = 0;
  std::memcpy(&value, reversed, sizeof(value));
  return {.kind = Kind::kDouble, .number = value};
}

Pickled double_from_line(const std::string& line) {
  return {.kind = Kind::kDouble, .number = std::strtod(line.c_str(), nullptr)};
}

// As repr() writes it; escapes stay.
Pickled text_from_line(const std::string& line) {
  const bool is_quoted = line.size() >= 2 && line.front() == line.back();
  return pickled_text(is_quoted ? line.substr(1, line.size() - 2) : line);
}

struct Machine {
  PickleInput& input;
  PickleStack& stack;
};

template <size_t kBytes>
void skip(Machine& machine) {
  machine.input.take(kBytes);
}

// Numbers and texts.

template <bool kValue>
void push_bool(Machine& machine) {
  machine.stack.push(pickled_bool(kValue));
}

template <class Number>
void push_integer(Machine& machine) {
  machine.stack.push(pickled_integer(machine.input.number<Number>()));
}

template <class Length>
void push_long_integer(Machine& machine) {
  const Length length = machine.input.number<Length>();
  machine.stack.push(integer_from_bytes(machine.input.take(length)));
}

void push_integer_line(Machine& machine) {
  machine.stack.push(integer_from_line(machine.input.line()));
}

void push_double(Machine& machine) {
  machine.stack.push(double_from_bytes(machine.input.take(sizeof(double))));
}

void push_double_line(Machine& machine) {
  machine.stack.push(double_from_line(machine.input.line()));
}

template <class Length>
void push_text(Machine& machine) {
  const Length length = machine.input.number<Length>();
  machine.stack.push(pickled_text(std::string(machine.input.take(length))));
}

void push_text_line(Machine& machine) { machine.stack.push(pickled_text(machine.input.line())); }

void push_quoted_line(Machine& machine) {
  machine.stack.push(text_from_line(machine.input.line()));
}

// The stack and the memo.

void push_mark(Machine& machine) { machine.stack.push_mark(); }

void push_again(Machine& machine) { machine.stack.push_again(); }

void drop(Machine& machine) { machine.stack.drop(); }

void drop_to_mark(Machine& machine) { machine.stack.pop_to_mark(); }

void remember(Machine& machine) { machine.stack.remember(); }

template <class Index>
void remember_at(Machine& machine) {
  machine.stack.remember(machine.input.number<Index>());
}

void remember_at_line(Machine& machine) { machine.stack.remember(machine.input.line_index()); }

template <class Index>
void recall(Machine& machine) {
  machine.stack.recall(machine.input.number<Index>());
}

void recall_line(Machine& machine) { machine.stack.recall(machine.input.line_index()); }

// Lists, sets and dictionaries.

template <Kind kKind>
void push_empty(Machine& machine) {
  machine.stack.push({.kind = kKind});
}

template <Kind kKind, size_t kCount>
void push_of_some(Machine& machine) {
  machine.stack.push({.kind = kKind, .items = machine.stack.pop_some(kCount)});
}

template <Kind kKind>
void push_of_marked(Machine& machine) {
  machine.stack.push({.kind = kKind, .items = machine.stack.pop_to_mark()});
}

// To a list or set, or to an object of a class made of a list, whose entries have indices
// as keys.
void append_values(PickleStack& stack, const Values& values) {
  Pickled* const list = stack.top();
  const bool is_plain = list->is(Kind::kSequence) || list->is(Kind::kSet);
  if (!is_plain && !list->is(Kind::kCall)) {
    throw std::runtime_error("it appends to what is no list");
  }
  if (is_plain) {
    list->items.insert(list->items.end(), values.begin(), values.end());
    return;
  }
  for (const Pickled* value : values) {
    const auto index = static_cast<int64_t>(list->entries.size());
    list->entries.emplace_back(stack.make(pickled_integer(index)), value);
  }
}

void append_one(Machine& machine) { append_values(machine.stack, machine.stack.pop_some(1)); }

void append_marked(Machine& machine) { append_values(machine.stack, machine.stack.pop_to_mark()); }

void set_items(PickleStack& stack, const Values& values) {
  Pickled* const dict = stack.top();
  if (!dict->is(Kind::kDict) && !dict->is(Kind::kCall)) {
    throw std::runtime_error("it sets items of what is no dictionary");
  }
  if (values.size() % 2 != 0) throw std::runtime_error("a key has no value");
  for (size_t i = 0; i < values.size(); i += 2) {
    dict->entries.emplace_back(values[i], values[i + 1]);
  }
}

void set_one_item(Machine& machine) { set_items(machine.stack, machine.stack.pop_some(2)); }

void set_marked_items(Machine& machine) { set_items(machine.stack, machine.stack.pop_to_mark()); }

void push_dict_of_marked(Machine& machine) {
  const Values values = machine.stack.pop_to_mark();
  machine.stack.push({.kind = Kind::kDict});
  set_items(machine.stack, values);
}

// Classes, functions, calls of them, and persistent ids.

Pickled global_in_lines(PickleInput& input) {
  const std::string module = input.line();
  return {.kind = Kind::kGlobal, .text = module + " " + input.line()};
}

void push_global(Machine& machine) { machine.stack.push(global_in_lines(machine.input)); }

void push_stack_global(Machine& machine) {
  const Values names = machine.stack.pop_some(2);
  if (!names[0]->is(Kind::kString) || !names[1]->is(Kind::kString)) {
    throw std::runtime_error("a class without a name");
  }
  machine.stack.count_copied(names[0]->text.size() + names[1]->text.size());
  machine.stack.push({.kind = Kind::kGlobal, .text = names[0]->text + " " + names[1]->text});
}

void push_call(Machine& machine) {
  Values callee_and_arguments = machine.stack.pop_some(2);
  if (!callee_and_arguments[1]->is(Kind::kSequence)) {
    throw std::runtime_error("a call without arguments");
  }
  machine.stack.push({.kind = Kind::kCall, .items = std::move(callee_and_arguments)});
}

void push_new(Machine& machine) {
  push_call(machine);
  machine.stack.top()->is_new = true;
}

// With a dictionary of named arguments, which become entries.
void push_new_with_names(Machine& machine) {
  const Pickled* const names = machine.stack.pop();
  push_new(machine);
  machine.stack.count_copied(names->entries.size() * sizeof(names->entries[0]));
  machine.stack.top()->entries = names->entries;
}

void push_call_of(PickleStack& stack, const Pickled* callee, Values values) {
  const Pickled* const arguments =
      stack.make({.kind = Kind::kSequence, .items = std::move(values)});
  stack.push({.kind = Kind::kCall, .items = {callee, arguments}});
}

// A class and its arguments, all since the mark.
void push_object(Machine& machine) {
  Values values = machine.stack.pop_to_mark();
  if (values.empty()) throw std::runtime_error("a call of nothing");
  const Pickled* const callee = values.front();
  values.erase(values.begin());
  push_call_of(machine.stack, callee, std::move(values));
}

// The same where the class's name stands in the opcode.
void push_instance(Machine& machine) {
  const Pickled* const callee = machine.stack.make(global_in_lines(machine.input));
  push_call_of(machine.stack, callee, machine.stack.pop_to_mark());
}

void build(Machine& machine) {
  const Pickled* const state = machine.stack.pop();
  machine.stack.top()->state = state;
}

void push_persistent_line(Machine& machine) {
  const Pickled* const id = machine.stack.make(pickled_text(machine.input.line()));
  machine.stack.push({.kind = Kind::kPersistent, .items = {id}});
}

constexpr unsigned char kStop = '.';

// All of protocols 0 to 5 but those that need a registry or buffers from outside.
const std::map<unsigned char, void (*)(Machine&)> kOpcodes = {
    {0x80, skip<1>},                            // PROTO
    {0x95, skip<sizeof(uint64_t)>},             // FRAME
    {'N', push_empty<Kind::kNone>},             // NONE
    {0x88, push_bool<true>},                    // NEWTRUE
    {0x89, push_bool<false>},                   // NEWFALSE
    {'J', push_integer<int32_t>},               // BININT
    {'K', push_integer<uint8_t>},               // BININT1
    {'M', push_integer<uint16_t>},              // BININT2
    {0x8a, push_long_integer<uint8_t>},         // LONG1
    {0x8b, push_long_integer<uint32_t>},        // LONG4
    {'I', push_integer_line},                   // INT
    {'L', push_integer_line},                   // LONG
    {'G', push_double},                         // BINFLOAT
    {'F', push_double_line},                    // FLOAT
    {'X', push_text<uint32_t>},                 // BINUNICODE
    {0x8c, push_text<uint8_t>},                 // SHORT_BINUNICODE
    {0x8d, push_text<uint64_t>},                // BINUNICODE8
    {'B', push_text<uint32_t>},                 // BINBYTES
    {'C', push_text<uint8_t>},                  // SHORT_BINBYTES
    {0x8e, push_text<uint64_t>},                // BINBYTES8
    {0x96, push_text<uint64_t>},                // BYTEARRAY8
    {'T', push_text<uint32_t>},                 // BINSTRING
    {'U', push_text<uint8_t>},                  // SHORT_BINSTRING
    {'S', push_quoted_line},                    // STRING
    {'V', push_text_line},                      // UNICODE
    {0x94, remember},                           // MEMOIZE
    {'q', remember_at<uint8_t>},                // BINPUT
    {'r', remember_at<uint32_t>},               // LONG_BINPUT
    {'p', remember_at_line},                    // PUT
    {'h', recall<uint8_t>},                     // BINGET
    {'j', recall<uint32_t>},                    // LONG_BINGET
    {'g', recall_line},                         // GET
    {'(', push_mark},                           // MARK
    {'0', drop},                                // POP
    {'1', drop_to_mark},                        // POP_MARK
    {'2', push_again},                          // DUP
    {')', push_empty<Kind::kSequence>},         // EMPTY_TUPLE
    {']', push_empty<Kind::kSequence>},         // EMPTY_LIST
    {0x8f, push_empty<Kind::kSet>},             // EMPTY_SET
    {'}', push_empty<Kind::kDict>},             // EMPTY_DICT
    {0x85, push_of_some<Kind::kSequence, 1>},   // TUPLE1
    {0x86, push_of_some<Kind::kSequence, 2>},   // TUPLE2
    {0x87, push_of_some<Kind::kSequence, 3>},   // TUPLE3
    {'t', push_of_marked<Kind::kSequence>},     // TUPLE
    {'l', push_of_marked<Kind::kSequence>},     // LIST
    {0x91, push_of_marked<Kind::kSet>},         // FROZENSET
    {'d', push_dict_of_marked},                 // DICT
    {'a', append_one},                          // APPEND
    {'e', append_marked},                       // APPENDS
    {0x90, append_marked},                      // ADDITEMS
    {'s', set_one_item},                        // SETITEM
    {'u', set_marked_items},                    // SETITEMS
    {'c', push_global},                         // GLOBAL
    {0x93, push_stack_global},                  // STACK_GLOBAL
    {'R', push_call},                           // REDUCE
    {0x81, push_new},                           // NEWOBJ
    {0x92, push_new_with_names},                // NEWOBJ_EX
    {'o', push_object},                         // OBJ
    {'i', push_instance},                       // INST
    {'b', build},                               // BUILD
    {'P', push_persistent_line},                // PERSID
    {'Q', push_of_some<Kind::kPersistent, 1>},  // BINPERSID
};

}  // namespace

void run_opcodes(PickleInput& input, PickleStack& stack) {
  Machine machine{input, stack};  // NOLINT(misc-const-correctness): opcodes change it
  for (;;) {
    const auto opcode = input.number<unsigned char>();
    if (opcode == kStop) return;
    const auto found = kOpcodes.find(opcode);
    if (found == kOpcodes.end()) {
      throw std::runtime_error("opcode " + std::to_string(opcode) +
                               " is of no pickle that holds tensors");
    }
    found->second(machine);
  }
}

}  // namespace fsdp::internal::checkpoint
