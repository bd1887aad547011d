package testenv

import (
	"context"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"capstan.dev/capstan/internal/testenv/expect"
)

// Change reads, modifies and writes an object, and repeats that after each conflict, because controllers write most
// objects of a test as well.
func Change[T client.Object](ctx context.Context, c client.Client, obj T, change func(T)) error {
	return retry(ctx, c, obj, change, func(patch client.Patch) error { return c.Patch(ctx, obj, patch) })
}

// ChangeStatus is Change for the status.
func ChangeStatus[T client.Object](ctx context.Context, c client.Client, obj T, change func(T)) error {
	return retry(ctx, c, obj, change, func(patch client.Patch) error { return c.Status().Patch(ctx, obj, patch) })
}

func retry[T client.Object](ctx context.Context, c client.Client, obj T, change func(T), write func(client.Patch) error) error {
	for end := time.Now().Add(expect.Patience); ; {
		if err := c.Get(ctx, client.ObjectKeyFromObject(obj), obj); err != nil {
			return err
		}
		before := obj.DeepCopyObject().(client.Object)
		change(obj)
		err := write(client.MergeFromWithOptions(before, client.MergeFromWithOptimisticLock{}))
		if !apierrors.IsConflict(err) || time.Now().After(end) {
			return err
		}
	}
}
