# version.cmake - writes OUTPUT, a C file with the commit of the sources, if that is another than
# before.
# Every build runs it, so a new commit compiles this file and links the program, and nothing else.
# Sources without a repository of their own have no commit: one that they only lie in is another's.
# Usage: cmake -D SOURCE=folder -D OUTPUT=file -P version.cmake
set(ENV{GIT_OPTIONAL_LOCKS} 0)
execute_process(COMMAND git -C ${SOURCE} rev-parse --show-prefix OUTPUT_VARIABLE below
                OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
if(NOT failed AND below STREQUAL "")
  execute_process(COMMAND git -C ${SOURCE} describe --always --dirty OUTPUT_VARIABLE commit
                  OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
endif()
if(failed OR NOT below STREQUAL "")
  set(commit "")
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT [[
#include "version.h"

const char tr_commit[] = "@commit@";
]] @ONLY)
