"""Results: metrics, statistics, tables, charts, the report. Knows nothing of engines or routers."""
