# version.cmake - writes OUTPUT, a C file with the commit of the sources, if that is another than
# before.
# Every build runs it, so a new commit compiles this file and links the program, and nothing else.
# Usage: cmake -D SOURCE=folder -D OUTPUT=file -P version.cmake
set(ENV{GIT_OPTIONAL_LOCKS} 0)
execute_process(COMMAND git -C ${SOURCE} describe --always --dirty OUTPUT_VARIABLE commit
                OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
if(failed)
  set(commit "")
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT [[
#include "version.h"

const char tr_commit[] = "@commit@";
]] @ONLY)
