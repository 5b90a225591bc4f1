"""Generated messages; see etcdfence_wire.proto."""
