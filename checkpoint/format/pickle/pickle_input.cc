#include "checkpoint/format/pickle/pickle_input.h"

#include <charconv>
#include <system_error>

namespace fsdp::internal::checkpoint {

std::string_view PickleInput::take(uint64_t count) {
  if (count > rest_.size()) throw CutOffPickle();
  const std::string_view taken = rest_.substr(0, count);
  rest_.remove_prefix(count);
  return taken;
}

std::string PickleInput::line() {
  const size_t end = rest_.find('\n');
  if (end == std::string_view::npos) throw CutOffPickle();
  const std::string text(take(end));
  take(1);
  return text;
}

size_t PickleInput::line_index() {
  const std::string text = line();
  size_t index = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), index);
  if (error != std::errc()) throw std::runtime_error("a memo has no number");
  return index;
}

}  // namespace fsdp::internal::checkpoint
