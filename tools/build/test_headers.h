// What most files of tests include, compiled once (precompiled_header.bzl).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
