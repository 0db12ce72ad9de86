/* Peer of `benches/engines.rs`: the same bytes by plain MPI. Prints `what,bytes,seconds`, medians
 * of rank 0. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 20000 };

static int compare(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void exchange(char *out, char *in, int bytes, int peer) {
    MPI_Request requests[2];
    MPI_Irecv(in, bytes, MPI_BYTE, peer, 0, MPI_COMM_WORLD, &requests[0]);
    MPI_Isend(out, bytes, MPI_BYTE, peer, 0, MPI_COMM_WORLD, &requests[1]);
    MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
}

int main(int count, char **arguments) {
    int rank, size;
    MPI_Init(&count, &arguments);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    double budget = atof(arguments[1]);
    static double times[MOST];
    for (int argument = 2; argument < count; argument++) {
        size_t bytes = strtoull(arguments[argument], NULL, 10);
        char *out = malloc(bytes), *in = malloc(bytes);
        /* Not zeros: for those, the compiler emits a calloc, and sends read the system's single
         * page of zeros. */
        memset(out, 1, bytes);
        memset(in, 1, bytes);
        for (int what = 0; what < 2; what++) {
            int runs = 0, go_on = 1;
            double start = MPI_Wtime();
            while (go_on) {
                double before = MPI_Wtime();
                if (what == 0)
                    exchange(out, in, (int)bytes, size - 1 - rank);
                else
                    MPI_Allreduce(out, in, (int)(bytes / 4), MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
                double after = MPI_Wtime();
                times[runs++] = after - before;
                /* Rank 0 decides now and then whether to continue. */
                if (runs % 16 == 0) {
                    go_on = runs < MOST && after - start < budget;
                    MPI_Bcast(&go_on, 1, MPI_INT, 0, MPI_COMM_WORLD);
                }
            }
            qsort(times, runs, sizeof(double), compare);
            if (rank == 0)
                printf("%s,%zu,%.9f\n", what == 0 ? "exchange" : "all_reduce", bytes, times[runs / 2]);
        }
        free(out);
        free(in);
    }
    MPI_Finalize();
}
