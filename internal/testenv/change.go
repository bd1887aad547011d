package testenv

import (
	"context"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"sigs.k8s.io/controller-runtime/pkg/client"
)

// Change reads an object anew, changes it and stores it, again and again until nobody has written it meanwhile: most
// objects of a test are some controller's, too.
func Change[T client.Object](ctx context.Context, c client.Client, obj T, change func(T)) error {
	return again(ctx, c, obj, change, func(patch client.Patch) error { return c.Patch(ctx, obj, patch) })
}

// ChangeStatus is Change for the status.
func ChangeStatus[T client.Object](ctx context.Context, c client.Client, obj T, change func(T)) error {
	return again(ctx, c, obj, change, func(patch client.Patch) error { return c.Status().Patch(ctx, obj, patch) })
}

func again[T client.Object](ctx context.Context, c client.Client, obj T, change func(T), write func(client.Patch) error) error {
	for end := time.Now().Add(Patience); ; {
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
