// What most files of tests include, compiled once (precompiled_header.bzl). Examples
// start with it, too, also where GoogleTest is not installed.
#if __has_include(<gmock/gmock.h>)
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#endif
#include <torch/torch.h>
