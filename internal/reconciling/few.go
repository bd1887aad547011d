package reconciling

import (
	"context"
	"fmt"

	apimeta "k8s.io/apimachinery/pkg/api/meta"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// maxFew is the number of objects that ListFew accepts.
const maxFew = 1000

// ListFew lists objects of a workload cluster of which there are few. A tenant controls the API server, and more objects could occupy a
// worker for long, and the metrics of all clusters.
func ListFew(ctx context.Context, c client.Reader, list client.ObjectList, opts ...client.ListOption) error {
	if err := c.List(ctx, list, opts...); err != nil {
		return err
	}
	if n := apimeta.LenList(list); n > maxFew {
		return fmt.Errorf("expected at most %d objects, found %d in the answer of the API server of the cluster: delete those that are not needed", maxFew, n)
	}
	return nil
}
