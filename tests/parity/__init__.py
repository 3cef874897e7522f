"""Any pipelined run against the unpartitioned model, with settings combined two by two."""
