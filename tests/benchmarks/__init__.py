"""What measures: cases, tables, pages and pictures of `benchmarks/`, and README's figures."""
