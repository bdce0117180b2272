"""C++ that is compiled with the package or in the background: pool, programs, recorder."""
