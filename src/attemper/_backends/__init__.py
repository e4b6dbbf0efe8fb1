"""One file or folder for each way of computing a Problem; none imports another."""
