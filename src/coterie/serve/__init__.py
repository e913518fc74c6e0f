"""A local web page that lists run folders and watches runs. It reads run folders, and writes nothing."""
