"""The command line of etcdfence. Commands are thin: each calls the library and hands the result to `output`."""
