import numpy as np
import pytest

from ermoe.errors import UserError
from ermoe.train.loader import prepared


def doubled(request):
    epoch, index_B = request
    if epoch == 1:
        raise UserError("scan 7 is empty")
    return 2 * index_B


@pytest.mark.parametrize("workers", [0, 1])
def test_answers_come_in_order_and_a_mistake_as_its_one_sentence(workers):
    requests = [(0, np.arange(3)), (0, np.arange(5)), (1, np.arange(2))]
    answers = prepared(doubled, requests, workers=workers)
    assert next(answers).tolist() == [0, 2, 4]
    assert next(answers).tolist() == [0, 2, 4, 6, 8]
    with pytest.raises(UserError) as mistake:
        next(answers)
    assert str(mistake.value) == "scan 7 is empty"
