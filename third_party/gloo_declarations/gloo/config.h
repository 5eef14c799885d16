// Included by LibTorch's Gloo headers, which test only for macros that are absent in a build without extra transports.
#pragma once
