"""What a refresh measures: pass A (statistics), pass B (probe), and their reduction over ranks."""
