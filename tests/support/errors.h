// What was thrown, as a test wants to look at it.
//
//   expect_error<c10::ValueError>([&] { fully_shard(list, mesh); }, HasSubstr("container"));
//   EXPECT_THAT(message_of([&] { model->forward(x); }), HasSubstr("'block0'"));
#pragma once

#include <c10/util/Exception.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <string>

namespace fsdp::testing {

// Without c10's stack.
inline std::string text_of(const std::exception& error) {
  const auto* rich = dynamic_cast<const c10::Error*>(&error);
  return rich ? rich->what_without_backtrace() : error.what();
}

// The text of the Error that `body` throws, or "nothing was thrown".
template <class Error = std::exception>
std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return text_of(error);
  }
  return "nothing was thrown";
}

// `body` throws an Error whose text matches.
template <class Error = c10::Error, class Matcher>
void expect_error(const std::function<void()>& body, const Matcher& matcher) {
  try {
    body();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_THAT(text_of(error), matcher);
  }
}

}  // namespace fsdp::testing
