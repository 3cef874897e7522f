"""What tasks do: a stage's module and memory, and one async function per task kind."""
