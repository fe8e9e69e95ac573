"""What a pipeline's source refuses, so that its translation refuses it too: forms of tables, and values within."""
