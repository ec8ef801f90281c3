import timeit
from serving.frontend.generation.output import Output

print("read", timeit.timeit(lambda: Output().read([[97, 98, 99, 100]], 0), number=200000) / 200000 * 1e6)
