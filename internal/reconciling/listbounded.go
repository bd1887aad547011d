package reconciling

import (
	"context"
	"fmt"

	apimeta "k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// maxListed is the number of objects that ListBounded accepts.
const maxListed = 1000

// ListBounded lists objects of a workload cluster of which there are few. A tenant controls the API server, and more objects could occupy a
// worker for long, and the metrics of all clusters.
func ListBounded(ctx context.Context, c client.Reader, list client.ObjectList, opts ...client.ListOption) error {
	if err := c.List(ctx, list, opts...); err != nil {
		return err
	}
	if n := apimeta.LenList(list); n > maxListed {
		return fmt.Errorf("expected at most %d objects, found %d in the answer of the API server of the cluster: delete those that are not needed", maxListed, n)
	}
	return nil
}
