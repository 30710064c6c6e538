"""The store on S3: one client for each process, conditional writes, retries under a deadline."""
